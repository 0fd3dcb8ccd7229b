"""Phalanx trains large models on mixed, failing GPUs: any cluster, one loss curve.

What is listed here is the public API. Importing the package imports neither torch nor any other large library: a name
brings in what it needs when it is used first.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from phalanx.core import errors, renamed
from phalanx.core.version import __version__

if TYPE_CHECKING:
    from phalanx.api.batch_splitter import BatchSplitter
    from phalanx.api.fsdp.init import init, transform
    from phalanx.api.shard import shard
    from phalanx.api.sharded_model import ShardedModel
    from phalanx.api.sharded_step import ShardedStep
    from phalanx.compat.megatron.import_folder import import_megatron
    from phalanx.config.schema import Config
    from phalanx.data.images import Images, load_mnist
    from phalanx.generate.text import generate_text
    from phalanx.launch.from_python import Run, export, load_recipe, plan, train
    from phalanx.layout.model_shape import ModelSpec
    from phalanx.models.counter_rng import CounterRNG
    from phalanx.models.llama import Llama
    from phalanx.models.model import Model
    from phalanx.parallel.init_weights import rebuild_buffers, start_of
    from phalanx.planner.plan import Plan
    from phalanx.provision.cluster import Cluster
    from phalanx.tasks.task import Batch, DataSet
    from phalanx.tasks.task import CustomTask as Task
    from phalanx.trainer.callback import Callback, RunState

__all__ = [
    "Batch",
    "BatchSplitter",
    "Callback",
    "Cluster",
    "Config",
    "CounterRNG",
    "DataSet",
    "Images",
    "Llama",
    "Model",
    "ModelSpec",
    "Plan",
    "Run",
    "RunState",
    "ShardedModel",
    "ShardedStep",
    "Task",
    "__version__",
    "errors",
    "export",
    "generate_text",
    "import_megatron",
    "init",
    "load_mnist",
    "load_recipe",
    "plan",
    "rebuild_buffers",
    "shard",
    "start_of",
    "train",
    "transform",
]
# Public name -> the module that defines it, or "module:name" where it has another name there.
_PLACES = {
    # A run: train it, watch it, use what it made.
    "train": "phalanx.launch.from_python",
    "Run": "phalanx.launch.from_python",
    "load_recipe": "phalanx.launch.from_python",
    "Config": "phalanx.config.schema",
    "plan": "phalanx.launch.from_python",
    "Plan": "phalanx.planner.plan",
    "export": "phalanx.launch.from_python",
    "generate_text": "phalanx.generate.text",
    "import_megatron": "phalanx.compat.megatron.import_folder",
    # The machines.
    "Cluster": "phalanx.provision.cluster",
    # What a recipe's task.code, model.code and callback.code name.
    "Task": "phalanx.tasks.task:CustomTask",
    "Batch": "phalanx.tasks.task",
    "DataSet": "phalanx.tasks.task",
    "Images": "phalanx.data.images",
    "load_mnist": "phalanx.data.images",
    "Model": "phalanx.models.model",
    "CounterRNG": "phalanx.models.counter_rng",
    "Llama": "phalanx.models.llama",
    "ModelSpec": "phalanx.layout.model_shape",
    "Callback": "phalanx.trainer.callback",
    "RunState": "phalanx.trainer.callback",
    # A training loop of your own.
    "shard": "phalanx.api.shard",
    "ShardedModel": "phalanx.api.sharded_model",
    "ShardedStep": "phalanx.api.sharded_step",
    "rebuild_buffers": "phalanx.parallel.init_weights",
    "start_of": "phalanx.parallel.init_weights",
    "BatchSplitter": "phalanx.api.batch_splitter",
    "init": "phalanx.api.fsdp.init",
    "transform": "phalanx.api.fsdp.init",
}

sys.modules.setdefault(f"{__name__}.errors", errors)  # for `import phalanx.errors`
renamed.install()


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    module, _, inside = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), inside or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
