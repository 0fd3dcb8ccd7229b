"""Parallelism applied to a plain model, from outside and in one place: the order is the knowledge."""

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from phalanx.comm.mesh import Mesh
from phalanx.core.errors import ConfigError, is_out_of_memory
from phalanx.engine.interface import Engine, Precision
from phalanx.models import layers
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import Architecture, Model
from phalanx.optim.gradients import LossScale
from phalanx.optim.make_rule import make_rule
from phalanx.parallel import activations
from phalanx.parallel.model_part import ModelPart, partition_model
from phalanx.parallel.offload import ActivationOffloader, offload
from phalanx.system import accelerator

if TYPE_CHECKING:  # the loop runs where pydantic is not installed
    from phalanx.config.schema import Config

MakeEngine = Callable[..., Engine]
MAX_ERROR_CHARS = 200  # characters; compilers say much
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type of a rank's arithmetic on `device` under a resolved `train.dtype`."""
    return accelerator.best_dtype(device) if dtype == "mixed" else DTYPES[dtype]


def precision_of(dtype: str, mesh: Mesh) -> Precision:
    """The types that this rank computes and exchanges in under a resolved `train.dtype`."""
    compute = compute_dtype(dtype, mesh.device)
    return Precision(compute, torch.float32 if dtype == "mixed" and mesh.world > 1 else compute)


def parallelize(
    model: Model, config: "Config", mesh: Mesh, make_engine: MakeEngine, nominal_weight: int
) -> tuple[Engine, ModelPart]:
    """Prepare a model on meta for training by the resolved `config`; returns the engine that drives it, and what this
    rank holds of it."""
    # What other ranks hold is let go of first: nothing need be done to it.
    parted = partition_model(model, config, mesh, precision_of(config.train.dtype, mesh))
    # Recomputation and compilation after slicing: blocks exchange with other ranks from within.
    change_blocks(model, config, sizes_change=mesh.world > 1 and config.balance.batch == "auto")
    # The engine after compilation: its hooks stay outside the compiled code and gather parameters before it runs.
    train, precision = config.train, precision_of(config.train.dtype, mesh)
    # All ranks scale their losses alike, also those that need not, since their gradients are added up.
    (scaled,) = mesh.max([float(precision.compute == torch.float16)])
    engine = make_engine(
        model,
        sharding_units(model),
        mesh=mesh.data,
        rule=make_rule(config.optim),
        nominal_weight=nominal_weight,
        precision=precision,
        loss_scale=LossScale(train.loss_scale, train.loss_scale_growth_interval, mesh.device) if scaled else None,
        **({"copies": parted.copies} if parted.copies else {}),
    )
    if not isinstance(model, Architecture):
        cast_at_edges(model, precision.compute)
    # Memory last of all: what each rank must hold is known only now (see materialize.py).
    return engine, parted


def sharding_units(model: Model) -> list[tuple[str, nn.Module]]:
    """The units that an engine shards one by one. What two units use (an embedding that is the head's too) must be
    whole for both, and so belongs to the model itself."""
    return [unit for unit in model.units() if unit[0] not in model.shared_units()]


def cast_at_edges(model: nn.Module, dtype: torch.dtype) -> None:
    """Have `model` take floating-point inputs in the type that it computes in, and give its results in float32 or
    better, so that a task of a user's own needs to know nothing of types."""

    def narrowed(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    def widened(_: nn.Module, args: Any, output: Any) -> Any:
        wide = torch.promote_types(dtype, torch.float32)
        return tree_map_only(torch.Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, output)

    model.register_forward_pre_hook(narrowed, with_kwargs=True)
    model.register_forward_hook(widened)


def change_blocks(model: Model, config: "Config", sizes_change: bool = False) -> ActivationOffloader | None:
    """What is done to the model's own code, whatever drives it; returns what moves activations to the host, if anything
    does. `sizes_change`: a micro-batch may have another number of sequences in every step."""
    blocks, memory = model.blocks(), config.memory
    assert memory.activations != "auto"
    if memory.activations != "none":
        activations.recompute(blocks, selective=memory.activations == "selective")
    # Compile after recomputation, so that the compiler sees what is recomputed and can fuse across it.
    if config.train.compile:
        compile_units(model, blocks, sizes_change)
    # Offload after compilation: it is about what a block saves, compiled or not, and copies are not to be compiled.
    return offload(blocks, memory.offload_prefetch_blocks) if memory.activations == "offload" else None


def find_compile_problem(device: torch.device) -> str:
    """What is wrong where torch.compile can make no code for `device`, in one line; "" where it can."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ x).square().sum()

    x = torch.ones(16, 16, device=device, requires_grad=True)
    logging.disable()  # compilers log what they raise
    try:
        prepare_caches()
        # By this process: those that compile side by side would outlive the trial.
        with torch._inductor.config.patch(compile_threads=1):
            (found,) = torch.autograd.grad(torch.compile(block, fullgraph=True)(x), x)
        found.tolist()  # and the code runs
    except Exception as error:  # of whichever compiler
        if is_out_of_memory(error):
            raise
        said = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
        return " ".join(said.split())[:MAX_ERROR_CHARS] or type(error).__name__
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _of_any_size(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block; the compiler is told beforehand what else it would find out by compiling twice."""
    for value in (*args, *kwargs.values()):
        tensor = value.samples if isinstance(value, CounterRNG) else value
        # Hidden states, samples, and the offsets of documents; tables of positions (S, d) are those of one row.
        if isinstance(tensor, torch.Tensor) and tensor.dim() not in (0, 2):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(*args, **kwargs)


def _of_any_length(compiled: Callable[..., Any], hidden: torch.Tensor, weight: Any, labels: Any, *rest: Any) -> Any:
    torch._dynamo.maybe_mark_dynamic(hidden, 0)
    torch._dynamo.maybe_mark_dynamic(labels, 0)
    return compiled(hidden, weight, labels, *rest)


def compile_units(model: Model, blocks: list[nn.Module], sizes_change: bool = False) -> None:
    """Compile each block's forward, and the loss's inner function. Equal blocks share one compilation, and so do, if
    `sizes_change`, micro-batches of any number of sequences but one. Raises ConfigError where torch's cache is another
    user's."""
    prepare_caches()
    for block in blocks:
        compiled = torch.compile(block.forward, fullgraph=True)
        block.forward = functools.partial(_of_any_size, compiled) if sizes_change else compiled
    chunk: layers.ChunkFn = torch.compile(layers._chunk, fullgraph=True)
    if sizes_change:
        chunk = functools.partial(_of_any_length, chunk)
    for module in model.losses():
        if module.cross_entropy_sum is layers.cross_entropy_sum:  # one that talks to other ranks stays as it is
            module.cross_entropy_sum = functools.partial(layers.cross_entropy_sum, chunk_fn=chunk)


# ------------------------------------------------------------------------------------------------------- compile cache
# Torch's cache of compiled code: that nobody else can put code there, and what killed processes have left in it. torch
# takes a library that exists for one that is whole. A linker that was killed leaves an empty or torn one, which every
# later start would load and die of ("file too short"). While it builds one, torch keeps a folder beside it and holds a
# lock; a folder that stays without anybody holding the lock tells of a build that never ended. By default the cache has
# a name in the place for temporary files that can be foreseen, and torch runs what it finds there.


BUILDING = "_CxxBuild"  # how the names of those folders end
HEADERS = "precompiled_headers"  # the folder in the cache that has locks of its own
RESULTS = (".so", ".o", ".gch")
OWN_LOCK = ("", "main", "h")  # other builds hold a lock of another name, and are left alone


def prepare_caches() -> None:
    """Sweep where torch compiles for this process: the cache, and the place of headers, which cannot be moved. Raises
    ConfigError where that is not this user's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    check_cache_owner(Path(default_cache_dir()))
    for cache in {cache_dir(), default_cache_dir()}:
        remove_stale_files(Path(cache))


def check_cache_owner(cache: Path) -> None:
    """Make a folder that is this user's alone, or raise ConfigError where there is one of another user."""
    with contextlib.suppress(FileExistsError):
        cache.mkdir(mode=0o700)
    found = cache.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{cache}, whose code torch would run, is another user's or a link; have it removed, set TMPDIR to a "
            "folder of your own, or train.compile=false"
        )


def remove_stale_files(cache: Path) -> list[str]:
    """Remove from torch's cache what builds that were killed have left; returns the names. Any number of processes may
    do so, also while others compile."""
    removed = []
    for folder in sorted(cache.glob(f"*/*{BUILDING}")):
        name = folder.name.removesuffix(BUILDING)
        if name.partition(".")[2] not in OWN_LOCK:
            continue
        locks = folder.parent / "locks" if folder.parent.name == HEADERS else cache / "locks"
        lock = locks / f"{name.partition('.')[0]}.lock"
        # Somebody is building it, or cannot be asked: then it stays, at worst as it was.
        with contextlib.suppress(OSError), open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not folder.is_dir() or not os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                continue
            for suffix in RESULTS:
                (folder.parent / f"{name}{suffix}").unlink(missing_ok=True)
            shutil.rmtree(folder)
            removed.append(name)
    return removed
