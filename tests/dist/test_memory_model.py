"""What ranks hold while they train, counted storage by storage, is what the model of bytes says."""

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.autotune.rank_bytes import StateLayout, state_items
from phalanx.comm.mesh import Mesh, join, single_rank_mesh
from phalanx.core.placement import Placement
from phalanx.engine.fsdp2 import Fsdp2Engine
from phalanx.engine.interface import Precision
from phalanx.engine.sharded import ShardedEngine
from phalanx.engine.sharding_spec import ShardingSpec
from phalanx.engine.single import SingleEngine
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.llama import Llama
from phalanx.optim import gradients
from phalanx.parallel import activations
from phalanx.parallel.init_weights import make_random_fill, materialize
from phalanx.parallel.offload import offload
from phalanx.parallel.parallelize import sharding_units
from tests.dist.engine_cases import ADAMW
from tests.helpers import run_ranks, some

# Wide, of few words and on two tokens, so that activations and the loss are less than a hundredth of what is held.
SPEC = ModelSpec(
    vocab_size=128, hidden=192, layers=4, heads=4, kv_heads=4, head_dim=48, intermediate=512, max_seq_len=8,
)  # fmt: skip
WEIGHT_BYTES = 2**16  # no activation is as large, and any matrix
SEARCH_EACH = 16  # operations that make a large one
# Elements of a block, whose gradients autograd has made before they are taken over; and of what is said, what is seen.
BLOCK = 4 * SPEC.hidden**2 + 3 * SPEC.hidden * SPEC.intermediate
LEAST, MOST = 0.98, 1.05
# At times: a fast link gives buffers back before all are taken, and a single rank that sums micro-batches holds
# no whole narrow gradient.
LEAST_AT_TIMES = 0.85
PRECISIONS = {
    "fp32": Precision(torch.float32, torch.float32),
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "mixed": Precision(torch.bfloat16, torch.float32),
}
UNEVEN = (3.0, 1.0)
# Precision, whether the head is tied, the sharding (None: fully_shard), and whether activations move to the host.
EVERY: tuple[tuple[str, bool, ShardingSpec | None, bool], ...] = (
    ("fp32", False, ShardingSpec(1, slots=2), False),
    ("bf16", True, ShardingSpec(1, weights=UNEVEN), True),
    ("mixed", False, ShardingSpec(1, "per_micro_batch"), False),
    ("bf16", True, ShardingSpec(2, "per_step", weights=UNEVEN), False),
    ("fp32", False, ShardingSpec(2, "per_micro_batch", weights=UNEVEN), True),
    ("bf16", False, ShardingSpec(3, "per_micro_batch"), False),
    ("fp32", True, ShardingSpec(3, "per_step", weights=UNEVEN), True),
    ("bf16", False, None, False),
)
CASES = some(EVERY, 0, 1, 2, 3, 4, 6, 7)


def is_plain(tensor: object) -> bool:
    """A tensor with memory of its own."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"  # type: ignore[attr-defined]


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages that there are at a time, behind each operation of this thread that makes a large one:
    those that its operations have made, and now and then those of all tensors that Python knows of other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._turn = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        large = [each for each in _pytree.tree_leaves(made) if is_plain(each) and each.nbytes >= WEIGHT_BYTES]
        if large:
            self._turn += 1
            self.look(large if self._turn % SEARCH_EACH else [*large, *filter(is_plain, gc.get_objects())])
        return made

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        for each in tensors:
            memory = each.untyped_storage()
            self._known[memory._cdata] = weakref.ref(memory)
        alive = {address: memory for address, each in self._known.items() if (memory := each()) is not None}
        self._known = {address: self._known[address] for address in alive}
        self.most = max(self.most, sum(memory.nbytes() for memory in alive.values()))


def held(mesh: Mesh, layout: StateLayout, tied: bool, offloaded: bool) -> list[int]:
    """The most bytes that a rank is seen to hold in two steps, and those of the model."""
    spec = replace(SPEC, tie_embeddings=tied)
    with torch.device("meta"):
        model, twin = Llama(spec), Llama(spec)
    if offloaded:
        activations.recompute(model.blocks(), selective=False)
        offload(model.blocks(), 1)
    gc.collect()
    gc.freeze()  # what there is already does not count, and need not be looked through
    make: Any = SingleEngine if layout.ranks == 1 else Fsdp2Engine if layout.sharding is None else ShardedEngine
    engine = make(
        model, sharding_units(model), mesh=mesh, rule=layout.rule, nominal_weight=4, precision=layout.precision,
        **({} if layout.sharding is None else {"sharding": layout.sharding}),
    )  # fmt: skip
    materialize(model, engine, make_random_fill(model, 1))
    tokens = torch.arange(2)[None]
    with PeakBytes() as peak:
        for step in (1, 2):
            engine.begin_step(step, 4, 1e-3, 1.0)
            for last in (False, True):
                with engine.micro_batch(last=last):
                    gradients.backward(model(tokens, tokens, CounterRNG(0, step, torch.arange(1))), 4)
            engine.finish_step().get()
            engine.commit(step)
    engine.close()
    return [peak.most, sum(state_items(twin, spec, layout, mesh.rank).values())]


def hold_all(placement: Placement) -> list[list[int]]:
    found = []
    with join(placement, 60) as mesh:
        for precision, tied, sharding, offloaded in CASES:
            layout = StateLayout(PRECISIONS[precision], mesh.world, ADAMW, sharding)
            found.append(held(mesh.data, layout, tied, offloaded))
        with single_rank_mesh(mesh) as single:
            found.append(held(single, StateLayout(PRECISIONS["bf16"], 1, ADAMW), False, False))
    return found


def test_engines_hold_what_the_model_says() -> None:
    wrong = []
    for rank, rows in enumerate(run_ranks(hold_all, 2, timeout_s=300)):
        for case, (seen, said) in zip([*CASES, None], rows, strict=True):
            sharding = None if case is None else case[2]
            in_flight = sharding is not None and sharding.zero < 3 and sharding.reduce == "per_micro_batch"
            least = LEAST_AT_TIMES if in_flight or case is None else LEAST
            made = BLOCK * PRECISIONS["bf16" if case is None else case[0]].compute.itemsize
            print(f"rank {rank}: {seen / said:.4f} of {said} with {case or 'a single rank'}")
            if not least * said <= seen <= MOST * said + made:
                wrong.append((rank, case, seen, said))
    assert wrong == []
