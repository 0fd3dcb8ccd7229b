"""Scripts written for SageMaker's model parallel library, run as they are. Importing this makes `torch.sagemaker`
importable: `phalanx run script.py` does so before a script begins, and a script may do so itself."""

import sys

from phalanx.elastic.node import agent

if sys.argv[:1] == ["-m"]:  # this process may fork ranks, so numerical libraries are to start no threads in it
    agent.preload(("torch",))

from phalanx.compat.sagemaker.install import install

install()
