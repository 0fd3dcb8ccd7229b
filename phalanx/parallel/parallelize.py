"""Apply tensor, pipeline and context parallelism, checkpointing, compilation and sharding to a plain model, in this
order."""

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from phalanx.comm.mesh import Mesh
from phalanx.comm.p2p import connect
from phalanx.core.errors import ConfigError, is_out_of_memory
from phalanx.engine.interface import Engine, Precision
from phalanx.layout.tensor_shards import EXPERTS
from phalanx.models import layers
from phalanx.models.batch_norm import batch_norms
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.model import Architecture, Model
from phalanx.optim.gradients import LossScale
from phalanx.optim.make_rule import make_rule
from phalanx.parallel import activations, fp8_delayed
from phalanx.parallel.context import ContextParallel, apply_context_parallel, find_context_attention
from phalanx.parallel.experts import find_divided_experts
from phalanx.parallel.fp8 import find_fp8_weights, train_in_fp8
from phalanx.parallel.model_buffers import prepare_buffers
from phalanx.parallel.model_part import ModelPart, partition_model
from phalanx.parallel.offload import ActivationOffloader, offload
from phalanx.system import accelerator

if TYPE_CHECKING:  # avoids the import of pydantic
    from phalanx.config.schema import Config

MakeEngine = Callable[..., Engine]
MAX_ERROR_CHARS = 200  # compilers' messages are long
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The type of a rank's arithmetic on `device` under a resolved `train.dtype`."""
    return accelerator.best_dtype(device) if dtype == "mixed" else DTYPES[dtype]


def precision_of(dtype: str, mesh: Mesh) -> Precision:
    """The mixed precision of this rank under a resolved `train.dtype`: types of arithmetic and of exchange."""
    compute = compute_dtype(dtype, mesh.device)
    return Precision(compute, torch.float32 if dtype == "mixed" and mesh.world > 1 else compute)


def parallelize(
    model: Model,
    config: "Config",
    mesh: Mesh,
    make_engine: MakeEngine,
    nominal_weight: int,
    context_shares: Sequence[float] = (),
    expert_counts: Sequence[int] = (),
) -> tuple[Engine, ModelPart]:
    """Parallelize a model on meta by the resolved `config`; returns its engine and this rank's part of the model.
    `context_shares`: parts of the ranks that take rows together with this one, in proportion; `expert_counts`: how many
    experts each of the ranks has that divide them with this one."""
    if config.train.dtype == "mixed":
        _check_types(mesh, precision_of("mixed", mesh).compute)
    # Remove other ranks' parts first.
    parted = partition_model(model, config, mesh, precision_of(config.train.dtype, mesh), expert_counts)
    # Context after slicing: its exchanges are of this rank's heads.
    if mesh.context is not None:
        by = config.parallel.context_by
        connect(mesh.context.group, mesh.device)
        apply_context_parallel(model, ContextParallel(mesh.context, mesh.traffic, by, context_shares))
    # Checkpointing and compilation after slicing, since blocks then contain collectives.
    first = mesh.tensor is None or mesh.tensor.rank == 0
    change_blocks(model, config, mesh.device, mesh.world > 1 and config.balance.batch == "auto", first)
    if not isinstance(model, Architecture):
        prepare_buffers(model, mesh.data, precision_of(config.train.dtype, mesh))
    # The engine after compilation: its hooks stay outside the compiled code and gather parameters before it runs.
    train, precision = config.train, precision_of(config.train.dtype, mesh)
    # All ranks scale their losses if any must, since their gradients are summed.
    (scaled,) = mesh.max([float(precision.compute == torch.float16)])
    reads_fp8 = train.fp8 == "block" and config.parallel.engine == "sharded"
    engine = make_engine(
        model,
        sharding_units(model),
        mesh=mesh.data,
        rule=make_rule(config.optim),
        nominal_weight=nominal_weight,
        precision=precision,
        loss_scale=LossScale(train.loss_scale, train.loss_scale_growth_interval, mesh.device) if scaled else None,
        **({"copies": parted.copies} if parted.copies else {}),
        **({"experts": [name for name in parted.shards if EXPERTS in name]} if mesh.expert is not None else {}),
        **({"fp8_weights": find_fp8_weights(model, model.blocks())} if reads_fp8 else {}),
    )
    if not isinstance(model, Architecture):
        cast_at_edges(model, precision.compute)
    # Memory is allocated last, once each rank's shards are known (see init_weights.py).
    return engine, parted


def _check_types(mesh: Mesh, compute: torch.dtype) -> None:
    """Raise ConfigError where ranks that exchange activations as they are compute in different types. Collective."""
    types = [list(DTYPES)[int(number)] for number in mesh.gather(float(list(DTYPES.values()).index(compute)))]
    for axis in ("tensor", "context"):
        for group in mesh.axes.groups(axis, mesh.world):
            if len(named := dict.fromkeys(types[rank] for rank in group)) > 1:
                raise ConfigError(
                    f"train.dtype is mixed, but ranks {', '.join(map(str, group))}, which parallel.{axis} has exchange "
                    f"activations, compute in {' and '.join(named)}; set train.dtype to one that all devices have, or "
                    f"parallel.{axis}=1"
                )


def sharding_units(model: Model) -> list[tuple[str, nn.Module]]:
    """The units that an engine shards one by one. Parameters that two units use (a tied embedding) must be whole for
    both, and so belong to the model itself."""
    return [unit for unit in model.units() if unit[0] not in model.shared_units()]


def cast_at_edges(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point inputs of `model` to its compute type and its results to float32 or better, so that a custom
    task need not handle types."""

    def narrowed(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    def widened(_: nn.Module, args: Any, output: Any) -> Any:
        wide = torch.promote_types(dtype, torch.float32)
        return tree_map_only(torch.Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, output)

    model.register_forward_pre_hook(narrowed, with_kwargs=True)
    model.register_forward_hook(widened)


def change_blocks(
    model: Model, config: "Config", device: torch.device, sizes_change: bool = False, first: bool = True
) -> ActivationOffloader | None:
    """Apply FP8, activation checkpointing, compilation and offloading to a model's blocks; returns the offloader, if
    any. `device` computes. `sizes_change`: the number of sequences of a micro-batch may vary. `first`: of its
    tensor-parallel peers."""
    blocks, memory = model.blocks(), config.memory
    assert memory.activations != "auto"
    if config.train.fp8 == "block":
        train_in_fp8(blocks, device)
    elif config.train.fp8 == "delayed":
        fp8_delayed.train_in_fp8(blocks, device, first)
    # Compile after checkpointing, so that the compiler sees what is recomputed and can fuse across it; but before it
    # where compiled code is interrupted, since nothing is compiled of a checkpoint with an interruption.
    interrupted = config.train.compile is True and any(
        find_context_attention(block) or find_divided_experts(block) for block in blocks
    )
    if interrupted:
        compile_units(model, blocks, sizes_change)
    if memory.activations != "none":
        activations.recompute(blocks, selective=memory.activations == "selective")
    if config.train.compile and not interrupted:
        compile_units(model, blocks, sizes_change)
    # Offload after compilation: it handles what a block saves, and its copies must not be compiled.
    return offload(blocks, memory.offload_prefetch_blocks) if memory.activations == "offload" else None


def find_compile_problem(device: torch.device) -> str:
    """Check torch.compile on `device`: the error in one line, or "" where it works."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x @ x).square().sum()

    x = torch.ones(16, 16, device=device, requires_grad=True)
    logging.disable()  # compilers log what they raise
    try:
        prepare_caches()
        # In this process: compile workers would outlive the check.
        with torch._inductor.config.patch(compile_threads=1):
            (found,) = torch.autograd.grad(torch.compile(block, fullgraph=True)(x), x)
        found.tolist()  # runs the code
    except Exception as error:  # of any compiler
        if is_out_of_memory(error):
            raise
        said = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
        return " ".join(said.split())[:MAX_ERROR_CHARS] or type(error).__name__
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _of_any_size(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a compiled block with dynamic dims marked, which spares a second compilation."""
    for value in (*args, *kwargs.values()):
        tensor = value.samples if isinstance(value, CounterRNG) else value
        # Hidden states, samples, and offsets of documents; tables of positions (S, d) belong to one row.
        if isinstance(tensor, torch.Tensor) and tensor.dim() not in (0, 2):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(*args, **kwargs)


def _of_any_length(compiled: Callable[..., Any], hidden: torch.Tensor, weight: Any, labels: Any, *rest: Any) -> Any:
    torch._dynamo.maybe_mark_dynamic(hidden, 0)
    torch._dynamo.maybe_mark_dynamic(labels, 0)
    return compiled(hidden, weight, labels, *rest)


def compile_units(model: Model, blocks: list[nn.Module], sizes_change: bool = False) -> None:
    """torch.compile each block's forward, and the inner function of the loss. Equal blocks share one compilation, and
    with `sizes_change` so do micro-batches of any number of sequences above one. Raises ConfigError where torch's cache
    belongs to another user."""
    prepare_caches()
    for block in blocks:
        # What exchanges with other ranks in Python: compiled code ends before it and begins behind it.
        norms, attentions = batch_norms(block).values(), find_context_attention(block)
        experts = find_divided_experts(block)
        for layer in norms:
            vars(layer)["forward"] = torch.compiler.disable(layer.forward)
        for each in attentions:
            each.attention_fn = torch.compiler.disable(each.attention_fn)
        for stacks in experts:
            stacks.exchange = torch.compiler.disable(stacks.exchange)
        compiled = torch.compile(block.forward, fullgraph=not (norms or attentions or experts))
        block.forward = functools.partial(_of_any_size, compiled) if sizes_change else compiled
    chunk: layers.ChunkFn = torch.compile(layers._chunk, fullgraph=True)
    if sizes_change:
        chunk = functools.partial(_of_any_length, chunk)
    for module in model.losses():
        if module.cross_entropy_sum is layers.cross_entropy_sum:  # not one with collectives
            module.cross_entropy_sum = functools.partial(layers.cross_entropy_sum, chunk_fn=chunk)


# ------------------------------------------------------------------------------------------------------- compile cache
# Torch's compile cache: no other user may put code there, and incomplete files of killed processes are removed. torch
# assumes that an existing library is complete. A killed linker leaves an empty or truncated one, with which every later
# start would fail ("file too short"). During a build torch keeps a folder beside the library and holds a lock; a folder
# whose lock is free is that of a killed build. By default the cache has a predictable name in the folder of temporary
# files, and torch runs the code that it finds there.


BUILDING = "_CxxBuild"  # suffix of the names of those folders
HEADERS = "precompiled_headers"  # the folder in the cache with separate locks
RESULTS = (".so", ".o", ".gch")
OWN_LOCK = ("", "main", "h")  # other builds hold a lock of another name, and are kept


def prepare_caches() -> None:
    """Prepare torch's compile caches: remove stale files of the cache and of the folder of headers, which cannot be
    moved. Raises ConfigError where one belongs to another user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    check_cache_owner(Path(default_cache_dir()))
    for cache in {cache_dir(), default_cache_dir()}:
        remove_stale_files(Path(cache))


def check_cache_owner(cache: Path) -> None:
    """Create a private folder, or raise ConfigError where it exists and belongs to another user."""
    with contextlib.suppress(FileExistsError):
        cache.mkdir(mode=0o700)
    found = cache.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{cache}, whose code torch would run, is another user's or a link; have it removed, set TMPDIR to a "
            "private folder, or train.compile=false"
        )


def remove_stale_files(cache: Path) -> list[str]:
    """Remove files of killed builds from torch's compile cache; returns their names. Processes may do so concurrently,
    also while others compile."""
    removed = []
    for folder in sorted(cache.glob(f"*/*{BUILDING}")):
        name = folder.name.removesuffix(BUILDING)
        if name.partition(".")[2] not in OWN_LOCK:
            continue
        locks = folder.parent / "locks" if folder.parent.name == HEADERS else cache / "locks"
        lock = locks / f"{name.partition('.')[0]}.lock"
        # A build is in progress, or its lock is unreadable: keep it.
        with contextlib.suppress(OSError), open(lock, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not folder.is_dir() or not os.path.samestat(os.fstat(file.fileno()), os.stat(lock)):
                continue
            for suffix in RESULTS:
                (folder.parent / f"{name}{suffix}").unlink(missing_ok=True)
            shutil.rmtree(folder)
            removed.append(name)
    return removed
