"""Phalanx trains large models on the GPUs you really have, with one loss curve. Importing this imports no torch.

`phalanx.shard(model, ...)` puts a model of a training loop of one's own on the sharded engine: see `phalanx.api.shard`.
`phalanx.Callback` is the base class of what a run calls while it trains: see `phalanx.trainer.callback`.
`phalanx.init(...)` and `phalanx.transform(model)` divide ranks and tensors for FSDP: see `phalanx.api.fsdp.init`.
`phalanx.rebuild_buffers` and `phalanx.start_of` give first values to one of transformers that was built on meta.
"""

import importlib
from typing import Any

from phalanx.core import renamed

__version__ = "0.1.0"

# What is found here though it lives in a module that needs torch, which is imported when it is asked for.
_ELSEWHERE = {
    "Callback": "phalanx.trainer.callback",
    "plan": "phalanx.launch.from_python",
    "train": "phalanx.launch.from_python",
    "shard": "phalanx.api.shard",
    "init": "phalanx.api.fsdp.init",
    "transform": "phalanx.api.fsdp.init",
    "rebuild_buffers": "phalanx.parallel.init_weights",
    "start_of": "phalanx.parallel.init_weights",
}

renamed.install()


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    return getattr(importlib.import_module(_ELSEWHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ELSEWHERE])
