"""Scripts written for SageMaker's model parallel library, run as they are. Importing this makes `torch.sagemaker`
importable: `phalanx run script.py` does so before a script begins, and a script of one's own may do so itself."""

from phalanx.compat.sagemaker.install import install

install()
