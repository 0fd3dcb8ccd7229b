"""Every knob does something: for each key of the configuration a tiny real run, or the real thing that reads the key,
in which another value is seen to change what happens. A key without an entry in CASES fails.
"""

import dataclasses
import functools
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load
from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config, iter_knobs
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.json_lines import read_lines
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.data import prepare, read_chunks
from phalanx.launch.schedulers import slurm_script
from phalanx.launch.schedulers.scheduler import LaunchOptions
from phalanx.models.families.catalog import PRESETS
from tests.dist import command
from tests.dist.test_replicas import replicates
from tests.helpers import run_ranks
from tests.unit.field_runs import (
    BASE,
    CHAT,
    CLASSIFY,
    DELAYED,
    EXPERTS,
    GROUPS,
    LATENT,
    LORA,
    MASKED,
    MOE,
    OFFLOAD,
    PROMPTS,
    ROPE,
    SGD,
    TAG,
    TASK,
    WSD,
    YARN,
    Seen,
    configured,
    observe,
    write_text,
)
from tests.unit.test_prepare_sets import children

# ----------------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Case:
    """What is changed, what must be seen then (called with the base's and the changed), and how it is found out."""

    changes: dict[str, Any]
    check: Callable[[Seen, Seen], None]
    how: str = "walk"
    beside: str = "base"


def curve(base: Seen, seen: Seen) -> None:
    """Another curve, from the first step on."""
    assert len(seen["loss"]) == len(base["loss"]) == 3
    assert seen["loss"][0] != base["loss"][0]


def updates(base: Seen, seen: Seen) -> None:
    """The same first loss and gradient, but other updates."""
    assert seen["loss"][0] == base["loss"][0]
    assert seen["grad_norm"][0] == base["grad_norm"][0]
    assert seen["loss"][2] != base["loss"][2]


def gradients(base: Seen, seen: Seen) -> None:
    """The same first loss, but other gradients."""
    assert seen["loss"][0] == base["loss"][0]
    assert seen["grad_norm"] != base["grad_norm"]


def rates(expected: Callable[[list[float]], list[float]]) -> Callable[[Seen, Seen], None]:
    def check(base: Seen, seen: Seen) -> None:
        assert seen["lr"] == pytest.approx(expected(base["lr"]), rel=1e-12)
        assert seen["lr"] != pytest.approx(base["lr"], rel=1e-3)
        assert seen["loss"] != base["loss"]

    return check


def bigger(by: int) -> Callable[[Seen, Seen], None]:
    def check(base: Seen, seen: Seen) -> None:
        assert seen["parameters"] - base["parameters"] == by
        assert seen["loss"] != base["loss"]

    return check


def equal(path: str, expected: object, before: object) -> Callable[[Seen, Seen], None]:
    def check(base: Seen, seen: Seen) -> None:
        for values, value in ((base, before), (seen, expected)):
            for part in path.split("."):
                values = values[part]
            assert values == value, path

    return check


def both(*checks: Callable[[Seen, Seen], None]) -> Callable[[Seen, Seen], None]:
    def check(base: Seen, seen: Seen) -> None:
        for each in checks:
            each(base, seen)

    return check


def _preset(base: Seen, seen: Seen) -> None:
    """The smallest of them is too big to run here: what reads the key is asked."""
    widths = {name: build_model_spec(configured({"model": {"preset": name}}, Path())).hidden for name in PRESETS}
    assert widths["llama-3.2-1b"] == 2048
    assert widths["llama-3-8b"] == 4096
    assert base["config"]["model"]["preset"] is None


def _callback(base: Seen, seen: Seen) -> None:
    """What tests/dist/test_callbacks.py has called in runs is made of the file, by the options."""
    from phalanx.trainer.callback_runner import collect_callbacks

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(
            "import phalanx\n\n\nclass Callback(phalanx.Callback):\n"
            "    def __init__(self, after=1):\n        self.after = after\n"
        )
        found = []
        for changes in (
            {},
            {"callback.code": str(file)},
            {"callback.code": str(file), "callback.options": {"after": 3}},
        ):
            named = collect_callbacks(configured(changes, Path()), RunPaths(Path(folder) / "run"), ())
            found.append([vars(each.callback) for each in named])
    assert found == [[], [{"after": 1}], [{"after": 3}]]


def _from_hf(base: Seen, seen: Seen) -> None:
    assert seen["parameters"] == base["parameters"]
    assert seen["loss"][0] < base["loss"][2]  # it begins where the exported run ended


def more_tokens(base: Seen, seen: Seen) -> None:
    assert all(now > then for now, then in zip(seen["tokens"], base["tokens"], strict=True))


def fewer_tokens(base: Seen, seen: Seen) -> None:
    """The last token of a document has nothing to foretell; a step may happen to hold none."""
    assert sum(seen["tokens"]) < sum(base["tokens"])


def _validation(base: Seen, seen: Seen) -> None:
    [held_out, further] = seen["evaluated"]
    assert [held_out] == base["evaluated"]
    assert further[0] == 3
    assert further[2] != held_out[2]
    assert seen["loss"] == base["loss"]


def _moe(**section: Any) -> dict[str, Any]:
    return MOE | {"model.moe": EXPERTS | section}


def _groups(**section: Any) -> dict[str, Any]:
    return LATENT | {"model.moe": GROUPS | section}


def _lora(**section: Any) -> dict[str, Any]:
    return {"model": LORA["model"] | {"lora": {"rank": 2} | section}}


def _adapters(base: Seen, seen: Seen) -> None:
    """B starts as zero, so that the first loss is that of the frozen weights; what is learnt beside them differs."""
    assert seen["loss"][0] == base["loss"][0]
    assert seen["loss"][2] != base["loss"][2]


def _adapter(base: Seen, seen: Seen) -> None:
    assert seen["loss"][0] < base["loss"][2]  # it begins where the run with the adapter ended
    assert seen["config"]["model"]["lora"]["rank"] == 2


def _cache(base: Seen, seen: Seen) -> None:
    assert "/elsewhere/" in seen["train_tokens"][0] and "/cache/" in base["train_tokens"][0]
    assert seen["loss"] == base["loss"]


def _workers() -> None:
    """As many processes tokenise at once, where the source is worth it."""
    found = {}
    for count in (1, 2):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            write_text(Path(folder))
            patch.setattr(read_chunks, "CHUNK_BYTES", 500)
            patch.setattr(prepare, "SMALL_BYTES", 0)
            seen: list[int] = []
            data = configured({"data.workers": count, "data.tokenizer": "train"}, Path(folder)).data
            prepare.prepare(data, lambda *_, seen=seen: seen.append(len(children())))
            found[count] = max(seen)
    assert found == {1: 1, 2: 2}


def _held_out(base: Seen, seen: Seen) -> None:
    assert seen["train_tokens"] != base["train_tokens"]
    assert seen["evaluated"][0][2] != base["evaluated"][0][2]


def _tokenizer(base: Seen, seen: Seen) -> None:
    assert base["config"]["data"]["tokenizer"] == "train"
    assert seen["tokenizer_bytes"] == base["tokenizer_bytes"]  # the same file, found by its folder
    assert seen["train_tokens"] != base["train_tokens"]


def _timeout(base: Seen, seen: Seen) -> None:
    """A rank that never comes is waited for as long as that, and named."""
    waits = {}
    for seconds in (0.3, 3.0):
        reason = run_ranks(wait_for_a_missing_rank, 2, timeout_s=180, timeout=seconds)[0]
        waits[seconds] = reason["seconds"]
        assert "rank 1 of 2 did not arrive" in reason["message"]
    assert 0.3 <= waits[0.3] < 3.0 <= waits[3.0]


def wait_for_a_missing_rank(placement: Placement, timeout: float) -> dict[str, Any]:
    from phalanx.layout.model_shape import ModelSpec
    from phalanx.trainer import train_rank
    from phalanx.trainer.setup import TrainingJob

    if placement.rank == 1:
        time.sleep(timeout + 0.5)
        return {}
    changes = {"comm.timeout_s": timeout, "data.source": "x", "data.cache": "y"}
    spec = ModelSpec(vocab_size=1, hidden=2, layers=1, heads=1, kv_heads=1, head_dim=2, intermediate=1, max_seq_len=8)
    job = TrainingJob(configured(changes, Path()), spec, RunPaths(Path("nowhere")), [(Path("x"), 1.0)], {})
    begin = time.monotonic()
    try:
        train_rank.run_training(job, placement)
    except PhalanxError as error:
        return {"message": str(error), "seconds": time.monotonic() - begin}
    return {"message": "it came", "seconds": 0.0}


def _work(base: Seen, seen: Seen) -> None:
    """A rank three times as fast as the other, which the steps then show to be as slow as that."""
    assert run_ranks(divided, 2, timeout_s=180)[0] == {
        "auto": [[3, 1], [2, 2]],
        "measured-once": [[3, 1], [3, 1]],
        "even": [[2, 2], [2, 2]],
        "[1, 3]": [[1, 3], [1, 3]],
    }


def divided(placement: Placement) -> dict[str, list[Any]]:
    """Shares at the start, and after some steps, for each kind of value."""
    from phalanx.comm.mesh import join
    from phalanx.layout.balance import Speed
    from phalanx.workload.work_split import WorkSplit

    found: dict[str, list[Any]] = {}
    with join(placement, 30) as mesh:
        for work in ("auto", "measured-once", "even", [1, 3]):
            asked = load.build_config(BASE | {"balance": {"batch": work}}, "the test's recipe")
            sharing = WorkSplit(asked.balance.batch, 4, [Speed(1.0), Speed(3.0)], mesh)
            shares = [list(sharing.division.shares)]
            for step in range(1, 5):
                sharing.exchange(step, 0, sharing.division.shares[mesh.rank] * 1.0)
                sharing.settle()
            found[str(work)] = [*shares, list(sharing.division.shares)]
    return found


def _zero(base: Seen, seen: Seen) -> None:
    """Parameters are kept between steps, or not."""
    assert [by_rank["in_memory"] for by_rank in sharded_as("parallel.zero", 1)] == [8 * WEIGHTS] * 2
    one_nan_each = 2 * 8
    assert [by_rank["in_memory"] for by_rank in sharded_as("parallel.zero", 3)] == [one_nan_each] * 2


def _reduce(base: Seen, seen: Seen) -> None:
    """Of two micro-batches either is sent, half of it by each rank, or their sum."""
    once, twice = (sharded_as("parallel.grad_reduce", way)[0]["sent"] for way in ("per_step", "per_micro_batch"))
    assert twice - once == 8 * WEIGHTS // 2


def _shard_degree(base: Seen, seen: Seen) -> None:
    assert [by_rank["state"] for by_rank in sharded_as("parallel.shard_degree", 1)] == [3 * WEIGHTS, 3 * WEIGHTS]


def _state(base: Seen, seen: Seen) -> None:
    even, uneven = (sharded_as("balance.optimizer_state", state) for state in ("even", [3, 1]))
    assert [by_rank["state"] for by_rank in even] == [3 * WEIGHTS // 2, 3 * WEIGHTS // 2]
    assert [by_rank["state"] for by_rank in uneven] == [9 * WEIGHTS // 4, 3 * WEIGHTS // 4]


def _slots(base: Seen, seen: Seen) -> None:
    one, two = (sharded_as("optim.double_buffer", slots)[0]["state"] for slots in (False, True))
    assert two == 2 * one > 0


def _compress(base: Seen, seen: Seen) -> None:
    exact, rounded = (sharded_as("comm.compress", compress)[0]["weights"] for compress in ("none", "int8"))
    assert 0 < abs(exact - rounded) < exact / 200  # its block's scale has 8 bits


def _moves_twice_as_much(base: Seen, seen: Seen) -> None:
    """Of three blocks two inputs leave instead of one."""
    assert seen["moved_bytes"] == 2 * base["moved_bytes"] > 0


WEIGHTS = 2 * 32 * 32  # of the network below; AdamW keeps three numbers of each
SHARDED: dict[str, tuple[Any, ...]] = {
    "parallel.zero": (1, 3),
    "parallel.grad_reduce": ("per_step", "per_micro_batch"),
    "parallel.shard_degree": (1,),
    "balance.optimizer_state": ("even", [3, 1]),
    "optim.double_buffer": (False, True),
    "comm.compress": ("none", "int8"),
}


def sharded_as(key: str, value: Any) -> list[Seen]:
    """What each of two ranks has seen of the sharded engine under that value."""
    return [by_key[f"{key}={value}"] for by_key in _sharded_runs()]


@functools.cache
def _sharded_runs() -> list[dict[str, Seen]]:
    return run_ranks(sharded, 2, timeout_s=180)


def sharded(placement: Placement) -> dict[str, Seen]:
    """One step of two micro-batches for each value: elements of state that were allocated, bytes of parameters between
    steps, bytes handed to collectives."""
    import torch
    from torch import nn

    from phalanx.comm.mesh import join
    from phalanx.engine.interface import Precision
    from phalanx.optim.make_rule import make_rule
    from phalanx.workload.engines import make_engine_factory

    found = {}
    with join(placement, 30) as mesh:
        for key, value in [(key, value) for key, values in SHARDED.items() for value in values]:
            section, _, name = key.partition(".")
            tree = {**BASE, "parallel": {"engine": "sharded"}}
            asked = load.build_config(tree | {section: tree.get(section, {}) | {name: value}}, "the test's recipe")
            net = nn.Sequential(*(nn.Linear(32, 32, bias=False, dtype=torch.float64) for _ in range(2)))
            allocated: list[int] = []

            def allocate(
                name: str, kind: str, elements: int, dtype: Any, device: Any, allocated: list[int] = allocated
            ) -> Any:
                allocated.append(elements)
                return torch.zeros(elements, dtype=dtype, device=device)

            optim = asked.optim.model_copy(update={"weight_decay": 0.1})
            precision = Precision(torch.float64, torch.float64)
            engine = make_engine_factory(asked)(
                net,
                list(net.named_children()),
                mesh=mesh,
                rule=make_rule(optim),
                nominal_weight=1,
                precision=precision,
                allocate=allocate,
            )
            engine.initialise(lambda shard: shard.tensor.fill_(0.1))
            list(engine.pieces())  # waits until all has come
            mesh.traffic.take(), engine.traffic.take()
            engine.begin_step(1, 1, 1e-3, None)
            for last in (False, True):
                with engine.micro_batch(last):
                    net(torch.ones(1, 32, dtype=torch.float64)).sum().backward()
            engine.finish_step()
            list(engine.pieces())
            found[f"{key}={value}"] = {
                "in_memory": sum(parameter.untyped_storage().nbytes() for parameter in net.parameters()),
                "sent": mesh.traffic.take().payload_bytes + engine.traffic.take().payload_bytes,
                "state": sum(allocated),
            }
            with engine.full_parameters() as whole:
                found[f"{key}={value}"]["weights"] = whole["0.weight"][0, 0].item()
            engine.close()
    return found


def _layout(base: Seen, seen: Seen) -> None:
    """With auto the planner is asked, and what it says of micro-batches, as of all else, is what is reckoned with."""
    with tempfile.TemporaryDirectory() as folder:
        place = command.write_place(Path(folder))
        asked = ("train", "recipe.yaml", "train.micro_batch=auto", "--dry-run", "--json")
        given, auto = (
            json.loads(command.phalanx(place, *asked, f"parallel.layout={value}")[1]) for value in ("given", "auto")
        )
    assert given["planned"] is None
    assert (given["assumed"]["micro_batch"], given["assumed"]["micro_batch_measured"]) == (1, True)
    assert auto["assumed"]["micro_batch"] == auto["planned"]["keys"]["train.micro_batch"]
    assert auto["assumed"]["micro_batch_measured"] is False


def _tensor(base: Seen, seen: Seen) -> None:
    assert (layout("one")["queries"], layout("tensor")["queries"]) == ([16, 16], [8, 16])


def _sequence(base: Seen, seen: Seen) -> None:
    """Norms between the matrices see some of the positions, or all."""
    assert (layout("tensor")["norm"], layout("tensor, not sequence")["norm"]) == ("PartialRMSNorm", "RMSNorm")


def _pipeline(base: Seen, seen: Seen) -> None:
    assert (layout("one")["blocks"], layout("pipeline")["blocks"]) == (["0", "1", "2", "3"], ["0", "1", "2"])


def _schedule(base: Seen, seen: Seen) -> None:
    """The first stage begins to go back when all micro-batches have gone forward, or before."""
    assert (layout("pipeline")["ahead"], layout("gpipe")["ahead"]) == (2, 4)


def _stages(base: Seen, seen: Seen) -> None:
    assert layout("stages")["blocks"] == ["0"]


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor": 2, "sequence_parallel": True},
    "tensor, not sequence": {"tensor": 2, "sequence_parallel": False},
    "pipeline": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "stages": {"pipeline": 2, "layers_per_stage": [1, 3]},
}


def layout(name: str) -> Seen:
    """What the first of two ranks holds of a model of four blocks."""
    return _layouts()[0][name]


@functools.cache
def _layouts() -> list[dict[str, Seen]]:
    return run_ranks(held, 2, timeout_s=180)


def held(placement: Placement) -> dict[str, Seen]:
    import torch

    from phalanx.comm.mesh import attach_mesh, join
    from phalanx.engine.interface import Precision
    from phalanx.layout.mesh_axes import MeshAxes
    from phalanx.models.llama import Llama
    from phalanx.models.user_model import build_on_meta
    from phalanx.parallel.model_part import partition_model
    from phalanx.workload.workload import read_model_shape

    found = {}
    with join(placement, 30) as outer:
        for name, keys in LAYOUTS.items():
            model_keys = BASE["model"] | {"layers": 4, "vocab_size": 300}
            asked = load.build_config({**BASE, "model": model_keys, "parallel": keys}, "the test's recipe")
            with attach_mesh(outer.device, 30, MeshAxes(asked.parallel.tensor, asked.parallel.pipeline)) as mesh:
                model = build_on_meta(read_model_shape(asked), Llama)
                parted = partition_model(model, asked, mesh, Precision(torch.float32, torch.float32))
                block = next(iter(model.get_submodule("layers").children()))
                found[name] = {
                    "queries": list(block.get_submodule("attention.q").get_parameter("weight").shape),
                    "norm": type(block.get_submodule("mlp_norm")).__name__,
                    "blocks": [number for number, _ in model.get_submodule("layers").named_children()],
                }
                if parted.pipeline is not None:
                    kinds = [move.action.kind for move in parted.pipeline._moves(4, True) if move.kind == "do"]
                    found[name]["ahead"] = kinds.index("B")
    return found


def _context(base: Seen, seen: Seen) -> None:
    assert [by_rank["ring"]["positions"] for by_rank in _row_parts()] == [8, 8]


def _context_by(base: Seen, seen: Seen) -> None:
    assert [_row_parts()[0][name]["by"] for name in ("ring", "gather")] == ["ring", "gather"]


def _context_shares(base: Seen, seen: Seen) -> None:
    assert [by_rank["gather"]["positions"] for by_rank in _row_parts()] == [12, 4]


ROW_PARTS: dict[str, dict[str, Any]] = {
    "ring": {"parallel": {"context": 2, "context_by": "ring", "engine": "sharded"}},
    "gather": {"parallel": {"context": 2, "context_by": "gather", "engine": "sharded"}, "balance": {"context": [3, 1]}},
}


@functools.cache
def _row_parts() -> list[dict[str, Seen]]:
    return run_ranks(parts_of_rows, 2, timeout_s=180)


def parts_of_rows(placement: Placement) -> dict[str, Seen]:
    """How many positions of a row of 16 a rank has, and what its attention exchanges."""
    from phalanx.comm.mesh import attach_mesh, join
    from phalanx.config.resolve import resolve_autos
    from phalanx.layout.balance import Speed
    from phalanx.models.llama import Llama
    from phalanx.models.user_model import build_on_meta
    from phalanx.parallel.parallelize import parallelize
    from phalanx.tasks.language import CausalLMTask
    from phalanx.workload.context_task import find_context_shares, make_context_task
    from phalanx.workload.engines import make_engine_factory
    from phalanx.workload.workload import read_model_shape

    found = {}
    with join(placement, 30) as outer:
        for name, keys in ROW_PARTS.items():
            model_keys = BASE["model"] | {"vocab_size": 300}
            asked = load.build_config({**BASE, "model": model_keys, **keys}, "the test's recipe")
            asked, _ = resolve_autos(asked, device="cpu", world=2)
            spec = read_model_shape(asked)
            with attach_mesh(outer.device, 30, asked.parallel.axes) as mesh:
                model = build_on_meta(spec, Llama)
                shares = find_context_shares(asked, [Speed(1.0)] * 2, mesh)
                engine, _ = parallelize(model, asked, mesh, make_engine_factory(asked), 1, shares)
                batch = make_context_task(CausalLMTask(16), spec, mesh, shares).collate([])
                attention = model.get_submodule("layers.0.attention").attention_fn
                found[name] = {"positions": batch.inputs["tokens"].shape[1], "by": attention.__self__.by}
                engine.close()
    return found


def _expert(base: Seen, seen: Seen) -> None:
    assert [by_rank["even"] for by_rank in _experts_held()] == [2, 2]


def _expert_counts(base: Seen, seen: Seen) -> None:
    assert [by_rank["listed"] for by_rank in _experts_held()] == [3, 1]


@functools.cache
def _experts_held() -> list[dict[str, int]]:
    return run_ranks(experts_held, 2, timeout_s=180)


def experts_held(placement: Placement) -> dict[str, int]:
    """How many of four experts a rank has, of even numbers and of a list."""
    from phalanx.comm.mesh import attach_mesh, join
    from phalanx.config.resolve import resolve_autos
    from phalanx.models.user_model import build_on_meta, load_family_class
    from phalanx.parallel.parallelize import parallelize
    from phalanx.workload.engines import make_engine_factory
    from phalanx.workload.expert_counts import find_expert_counts
    from phalanx.workload.workload import read_model_shape

    model_keys = BASE["model"] | {"vocab_size": 300, "architecture": "qwen3_moe"}
    model_keys["moe"] = {"experts": 4, "experts_per_token": 2}
    found = {}
    with join(placement, 30) as outer:
        for name, wanted in (("even", "even"), ("listed", [3, 1])):
            keys = {"parallel": {"expert": 2, "engine": "sharded"}, "balance": {"experts": wanted}}
            asked = load.build_config({**BASE, "model": model_keys, **keys}, "the test's recipe")
            asked, _ = resolve_autos(asked, device="cpu", world=2)
            spec = read_model_shape(asked)
            assert spec is not None
            with attach_mesh(outer.device, 30, asked.parallel.axes) as mesh:
                model = build_on_meta(spec, load_family_class(spec.architecture))
                counts = find_expert_counts(asked, spec)
                engine, _ = parallelize(model, asked, mesh, make_engine_factory(asked), 1, (), counts)
                found[name] = model.get_parameter("layers.0.mlp.experts.down").shape[0]
                engine.close()
    return found


def _hardware(base: Seen, seen: Seen) -> None:
    """What the file says holds, and nothing is measured."""
    assert run_ranks(speeds_of_file, 2, timeout_s=180) == [[1.0, 3.0]] * 2


def speeds_of_file(placement: Placement) -> list[float]:
    from phalanx.autotune.measure import describe_work
    from phalanx.autotune.rank_speeds import find_rank_speeds
    from phalanx.comm.mesh import join
    from phalanx.layout.hardware import Hardware, MeasuredDevice, write_hardware
    from phalanx.workload.sinks import RecordWriter
    from phalanx.workload.workload import make_workload, read_model_shape

    with tempfile.TemporaryDirectory() as folder, join(placement, 30) as mesh:
        file = Path(folder, "given.json")
        config = configured({"model.vocab_size": 300, "balance.hardware": str(file)}, Path(folder))
        workload = make_workload(config, read_model_shape(config))
        devices = [MeasuredDevice(r, 0, r, "h", "cpu", "cpu", 1, 4, ((1, 2.0 * r + 1.0),), None) for r in range(2)]
        write_hardware(file, Hardware(describe_work(config, workload), tuple(devices), None))
        paths = RunPaths(Path(folder))
        speeds, _ = find_rank_speeds(config, workload, placement, mesh, paths, RecordWriter(paths, 1, [], active=True))
        return [speed.sequence_s for speed in speeds]


def _max_restarts(base: Seen, seen: Seen) -> None:
    """A run that fails at each attempt, since a file lies where TensorBoard wants its folder."""
    changes = [{"resilience.max_restarts": restarts} for restarts in (0, 2)]
    assert [len(attempts) for attempts in run_ranks(fail_again, 1, timeout_s=180, changes=changes)[0]] == [1, 3]


def _same_crash(base: Seen, seen: Seen) -> None:
    """Every attempt fails at the same line."""
    changes = [{"resilience.max_restarts": 9, "resilience.max_identical_failures": times} for times in (1, 2)]
    assert [len(attempts) for attempts in run_ranks(fail_again, 1, timeout_s=180, changes=changes)[0]] == [1, 2]


def _in_memory(base: Seen, seen: Seen) -> None:
    assert run_ranks(keep_in_memory, 1, timeout_s=180)[0] == [[True], [True], []]


def _storage_timeout(base: Seen, seen: Seen) -> None:
    said = run_ranks(away, 1, timeout_s=180)[0]
    assert ["could not be read for 0.2 s" in said[0], "could not be read for 0.4 s" in said[1]] == [True, True], said


def _private(base: Seen, seen: Seen) -> None:
    assert run_ranks(modes_of_records, 1, timeout_s=180)[0] == [0o644, 0o600]


def modes_of_records(placement: Placement) -> list[int]:
    """The mode of the configuration of a run that ends before its first step, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        os.umask(0o022)
        command.write_place(Path(folder))
        commands = [
            ["train", "recipe.yaml", "train.steps=0", f"storage.private={private}", "--run-dir", f"run-{private}"]
            for private in ("false", "true")
        ]
        command.call(placement, folder, commands)
        files = [Path(folder) / each[-1] / "config.yaml" for each in commands]
        return [stat.S_IMODE(file.stat().st_mode) for file in files]


def _health(base: Seen, seen: Seen) -> None:
    refused, code = run_ranks(with_few_files, 1, timeout_s=180)[0]
    assert "may open 200 files" in refused
    assert code == 0


def with_few_files(placement: Placement) -> list[Any]:
    """A start on a node that is not fit: looked at, and not."""
    import resource

    from phalanx.core.errors import Unhealthy
    from phalanx.launch import run

    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder))
        for health in ("quick", "off"):
            try:
                config = configured({"resilience.health": health, "train.steps": 1}, Path(folder))
                found.append(run.train(config, RunPaths(Path(folder) / "run"), 1, {}))
            except Unhealthy as error:
                found.append(str(error))
    return found


def away(placement: Placement) -> list[str]:
    """Runs at a URL of a store that does not answer."""
    from phalanx.core.errors import StorageError
    from phalanx.launch import child_run, run
    from tests.stores import register

    register().dead = True
    said = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.jsonl").write_text('{"text": "some words"}\n')
        for seconds in (0.2, 0.4):
            config = configured({"resilience.storage_timeout_s": seconds}, Path(folder))
            try:
                run.train(config, child_run.prepare_run_folder(config, f"faulty://{folder}/run"), 1, {})
            except StorageError as error:
                said.append(str(error))
    return said


LOST = "nodes were lost, and the remaining nodes cannot continue without them"


def _losses(key: str, values: tuple[Any, Any], expected: tuple[str, str]) -> Callable[[Seen, Seen], None]:
    """What the supervisor of a run on two nodes does under both values of a key, and not under the other one."""

    def check(base: Seen, seen: Seen) -> None:
        with tempfile.TemporaryDirectory() as folder:
            found = [decided(configured({key: value}, Path(folder))) for value in values]
        assert [[each in said for each in expected] for said in found] == [[True, False], [False, True]], found

    return check


def decided(config: Config) -> list[str]:
    """Names of what is done when a rank fails twice in the same way, a node is lost, nobody comes for 100 s, and it
    returns: of two nodes, one of which fails again later."""
    from phalanx.elastic.supervisor.decide import decide
    from phalanx.elastic.supervisor.state import (
        DivisionPrepared,
        FailureCause,
        JobState,
        Node,
        NodeJoined,
        NodeLost,
        NodeReady,
        NodeSlot,
        RanksEnded,
        SupervisorEvent,
        Tick,
    )
    from phalanx.launch.node_session import make_policy

    bug, both = FailureCause(1, 1, "the same"), (Node(0, "a", 1, "any", 1), Node(1, "b", 1, "any", 1))
    slots = (NodeSlot(1, "any"), NodeSlot(1, "any"))
    state = JobState(make_policy(config, 2), nodes=both, slots=slots, seats=(0, 1))
    said: list[str] = []
    events: list[SupervisorEvent] = [
        Tick(0), RanksEnded(1, 0, 1, 1, bug), RanksEnded(1, 1, 1, 1, bug), RanksEnded(2, 0, 2, 1, bug),
        RanksEnded(2, 1, 2, 1, bug), Tick(9), NodeLost(10, 1, "gone"), RanksEnded(10, 0, 3, 1), Tick(12),
        DivisionPrepared(13, 2), NodeReady(13, 0, 2), Tick(20),
        Tick(110), NodeJoined(110, Node(1, "b", 1, "any")), NodeReady(111, 1, state.division),
        NodeReady(111, 1, 2), RanksEnded(112, 0, 4, 10), DivisionPrepared(113, 3),
    ]  # fmt: skip
    for event in events:
        state, actions = decide(state, event)
        told = [(type(action).__name__, getattr(action, "attempt", getattr(action, "why", ""))) for action in actions]
        said += [f"{name} {what}" for name, what in told]
    return said


def _waiting(base: Seen, seen: Seen) -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, Any] = {"resilience.on_lost_node": ["wait"]}
        found = [
            decided(configured(keys | {"resilience.wait_for_node_s": seconds}, Path(folder)))
            for seconds in (50.0, 500.0)
        ]
    assert [f"FinishJob {LOST}" in said for said in found] == [True, False]


def _growing(base: Seen, seen: Seen) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = [decided(configured({"resilience.rejoin_nodes": grow}, Path(folder))) for grow in (False, True)]
    assert [said.count("PrepareDivision ") for said in found] == [1, 2]


def _replicates(base: Seen, seen: Seen) -> None:
    found = []
    for wanted in ("every_step", 2, "off"):
        with tempfile.TemporaryDirectory() as folder:
            config = configured({"resilience.replicate_every": wanted}, Path(folder))
            found.append(replicates(Path(folder), config.resilience.replicate_every))
    assert found == [[[1], [1]], [[], []], [None, None]]


def _heartbeat(base: Seen, seen: Seen) -> None:
    with tempfile.TemporaryDirectory() as folder:
        configs = [configured({"resilience.heartbeat_timeout_s": seconds}, Path(folder)) for seconds in (0.5, 60.0)]
    assert [silent(config.resilience.heartbeat_timeout_s) for config in configs] == [[1], []]


def silent(heartbeat_s: float) -> list[int]:
    """Who is lost to the first of two agents when the second has said nothing for 1.5 s and has closed nothing."""
    from phalanx.elastic.membership.heartbeat import HeartbeatSocket
    from phalanx.elastic.membership.listener import ConnectionListener, bind
    from phalanx.elastic.membership.member_list import MemberList, parse_member
    from phalanx.elastic.membership.membership import Membership
    from tests.unit.test_heartbeat_sender import Aloud

    places = [bind("127.0.0.1") for _ in range(2)]
    told = [{"node": node, "host": "", "devices": [["cpu", "any", True]]} for node in range(2)]
    members = tuple(parse_member({**told[node], **place.to_message()}) for node, place in enumerate(places))
    member_list = MemberList(1, 0, members)
    secret = "sixteen characters"
    beats = [HeartbeatSocket(place.beats, secret) for place in places]
    circles = [
        Membership(
            members[node], member_list, ConnectionListener(place.listener, secret, lambda host, why: None), beats[node],
            Aloud(members[node], beats[node]), heartbeat_s, None, lambda: None, lambda following: {},
        )
        for node, place in enumerate(places)
    ]  # fmt: skip
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for circle in circles:
            circle.poll_once()
        time.sleep(0.01)
    until = time.monotonic() + 1.5
    lost: list[int] = []
    while time.monotonic() < until:
        circles[0].poll_once()
        lost = lost or [member.node for member, _ in circles[0].losses]
        time.sleep(0.01)
    for circle in circles:
        circle.close()
    return lost


def keep_in_memory(placement: Placement) -> list[list[bool]]:
    """What a run says of its state in shared memory, by the value of the key."""
    from phalanx.launch import run

    found = []
    for wanted in ("auto", True, False):
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder))
            paths = RunPaths(Path(folder) / "run")
            changes = {"resilience.in_memory_checkpoints": wanted, "train.steps": 1}
            assert run.train(configured(changes, Path(folder)), paths, 1, {}) == 0
            events = [
                event for event in read_lines(paths.events) if event.get("key") == "resilience.in_memory_checkpoints"
            ]
            found.append([event["value"] for event in events])
    return found


def fail_again(placement: Placement, changes: list[dict[str, Any]]) -> list[list[int]]:
    from phalanx.launch import run

    found = []
    for each in changes:
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder))
            paths = RunPaths(Path(folder) / "run")
            paths.root.mkdir()
            paths.tensorboard.write_text("in the way")
            changed = configured(each | {"report.tensorboard": True}, Path(folder))
            assert run.train(changed, paths, 1, {}) == 1
            starts = [event for event in read_lines(paths.events) if event["kind"] == EventKind.ATTEMPT_STARTED]
            found.append([event["attempt"] for event in starts])
    return found


def _hang(base: Seen, seen: Seen) -> None:
    """Ten seconds without any change, after steps of one."""
    from phalanx.core.progress_page import RankProgress
    from phalanx.elastic.node.watchdog import find_hang
    from phalanx.launch import prepare

    found = {}
    for hang_s in (7, "auto", "off"):
        patience = prepare.hang_limits(configured({"resilience.hang_timeout_s": hang_s}, Path()))
        beat = RankProgress(0, 9, "forward", 0, "", idle_s=10.0, steps=8, longest_s=0.1)
        found[hang_s] = None if patience is None else find_hang([beat], {}, 1, patience) is not None
    assert found == {7: True, "auto": False, "off": None}


def _prometheus(base: Seen, seen: Seen) -> None:
    """What it serves is in test_alerts.py."""
    from phalanx.launch.observer import check_report

    check_report(configured({}, Path()).report)
    with pytest.raises(ConfigError, match=r"report\.prometheus"):
        check_report(configured({"report.prometheus": "203.0.113.1:9420"}, Path()).report)


def _webhook(base: Seen, seen: Seen) -> None:
    from phalanx.launch.observer import check_report

    with pytest.raises(ConfigError, match=r"report\.webhook"):
        check_report(configured({"report.webhook": "no such file"}, Path()).report)


def _judged(changes: dict[str, Any], *, loss: float | None) -> str:
    """What is done about a loss after thirty that are near 1, or about a gradient that is not finite."""
    from phalanx.core.errors import Diverged
    from phalanx.core.records import StepRecord
    from phalanx.trainer.anomalies import AnomalyDetector

    wanted = configured(changes, Path()).resilience
    anomalies = AnomalyDetector(wanted, [(step, 1.0 + step % 5 / 100) for step in range(1, 31)])
    rest: dict[str, Any] = dict.fromkeys(("grad_norm", "lr", "step_s", "tokens_per_s", "wait_s", "data_s"), 0.0)
    rest |= {"attempt": 1, "tokens": 1, "total_tokens": 1, "comm_bytes": 0, "mfu": None, "mfu_causal": None}
    record = StepRecord(step=31, loss=loss, memory_bytes=0, skipped=loss is None, **rest)
    try:
        wrong = anomalies.check_record(record, None)
    except Diverged:
        return "stopped"
    return "goes back" if wrong is not None else "goes on"


def _on_nan(base: Seen, seen: Seen) -> None:
    found = [_judged({"resilience.on_nan": what}, loss=None) for what in ("skip", "stop", "rollback")]
    assert found == ["goes on", "stopped", "goes back"]


def _on_spike(base: Seen, seen: Seen) -> None:
    found = [_judged({"resilience.on_spike": what}, loss=2.0) for what in ("off", "stop", "rollback")]
    assert found == ["goes on", "stopped", "goes back"]


def _spike_factor(base: Seen, seen: Seen) -> None:
    keys = {"resilience.on_spike": "stop"}
    found = [_judged(keys | {"resilience.spike_factor": factor}, loss=1.2) for factor in (5, 50)]
    assert found == ["stopped", "goes on"]


def _rollback_steps(base: Seen, seen: Seen) -> None:
    """The step that a run goes back to from its sixth."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"folder": folder, "key": "rollback_steps", "values": [1, 3], "fault": "nan:step=6"}
        found = run_ranks(gone_wrong, 1, **asked)[0]
    assert found == [[[EventKind.ROLLED_BACK, 4]], [[EventKind.ROLLED_BACK, 2]]]


def _checksum_every(base: Seen, seen: Seen) -> None:
    """The step behind which a bit that has flipped is found."""
    with tempfile.TemporaryDirectory() as folder:
        asked = {"folder": folder, "key": "checksum_every", "fault": "bit-flip:rank=1,step=4,parameter=embed.weight"}
        [never], [often] = (run_ranks(gone_wrong, 2, values=[every], **asked)[0] for every in (0, 2))
    assert never == []
    assert often == [[EventKind.CORRUPTED, 4], [EventKind.ROLLED_BACK, 2]]


def gone_wrong(placement: Placement, folder: str, key: str, values: list[int], fault: str) -> list[list[Any]]:
    """What is done about something that goes wrong: kinds of events and their steps, under each value of a key."""
    from phalanx.core import faults
    from phalanx.trainer import train_rank
    from tests.numerics import runs

    found = []
    for value in values:
        place = Path(folder, str(value))
        keys = {"train.steps": 7, "train.eval_sequences": 0, "checkpoint.every": 2, "resilience.on_nan": "rollback"}
        runs.write_tokens(place / str(placement.rank))
        described = runs.job(place, place / str(placement.rank), keys | {f"resilience.{key}": value}, placement.world)
        described = dataclasses.replace(described, faults=tuple(faults.parse_faults([fault])))
        train_rank.run_training(described, dataclasses.replace(placement, threads=1))
        kinds = (EventKind.CORRUPTED, EventKind.ROLLED_BACK)
        found.append([(e["kind"], e["step"]) for e in read_lines(described.paths.events) if e["kind"] in kinds])
    return found


def _stop_notice(base: Seen, seen: Seen) -> None:
    """What the agent's job is told."""
    from types import SimpleNamespace

    from phalanx.launch.node_session import NodeSession

    found = []
    for seconds in (30.0, 120.0):
        session = SimpleNamespace(
            devices=[SimpleNamespace(name="cpu")], shared=None, memory=SimpleNamespace(state=False),
            _note=print, _idle=print, _limit_has_fallen=print,
        )  # fmt: skip
        config = configured({"resilience.stop_notice_s": seconds}, Path())
        training = SimpleNamespace(config=config, paths=None)
        found.append(NodeSession.job_for(session, training, 1, 1).stop_notice_s)  # type: ignore[arg-type]
    assert found == [30.0, 120.0]


def _preemption(key: str, values: list[Any], expected: list[Any], **beside: Any) -> Callable[[Seen, Seen], None]:
    """The services that are watched, with their addresses."""

    def check(base: Seen, seen: Seen) -> None:
        from unittest import mock

        from phalanx.launch import preemption

        made: list[tuple[Any, ...]] = []
        with (
            mock.patch.object(preemption, "MetadataService", side_effect=lambda *given: made.append(given)),
            mock.patch.object(preemption, "fork", side_effect=lambda *_, **how: (0, os.open(os.devnull, os.O_RDONLY))),
            mock.patch.object(preemption, "end_child", side_effect=lambda pid, pidfd: os.close(pidfd)),
        ):
            for value in values:
                config = configured(beside | {f"resilience.{key}": value}, Path())
                with preemption.watch_for_preemption(config.resilience, RunPaths(Path())):
                    pass
        assert made == expected

    return check


def _script(option: str, value: Any, *lines: str, **beside: Any) -> Callable[[Seen, Seen], None]:
    """Lines that only the job's script of another value has."""

    def check(base: Seen, seen: Seen) -> None:
        before, after = (_script_of(beside | changes) for changes in ({}, {option: value}))
        for line in lines:
            assert line in after and line not in before, (line, after)

    return check


def _script_of(section: dict[str, Any]) -> str:
    config = configured({f"slurm.{key}": value for key, value in section.items()}, Path())
    asked = slurm_script.make_job_spec(config, RunPaths(Path("/runs/run")), LaunchOptions(nodes=3))
    return slurm_script.render_script(asked)


def _pods(key: str, values: tuple[Any, Any], *lines: str) -> Callable[[Seen, Seen], None]:
    """Lines that only the Kubernetes objects of the other value have."""

    def check(base: Seen, seen: Seen) -> None:
        from phalanx.launch.schedulers.kubernetes_manifest import render_manifest

        keys = {"k8s.image": "i", "k8s.volumes": ["c:/runs"], "k8s.gpus_per_node": 4, "k8s.shared_memory_gib": 5}
        keys |= {"k8s.partition": ["p"]}
        paths, options = RunPaths(Path("/runs/run")), LaunchOptions(nodes=2)
        found = [render_manifest(configured({**keys, key: value}, Path()), paths, options) for value in values]
        for line in lines:
            assert line in found[1] and line not in found[0], (line, found[1])

    return check


KUBERNETES: dict[str, Case] = {
    f"k8s.{key}": Case({}, _pods(f"k8s.{key}", values, *lines))
    for key, values, lines in (
        ("image", ("i", "j:2"), ["image: j:2"]),
        ("namespace", (None, "lab"), ["namespace: lab"]),
        ("volumes", (["c:/runs"], ["c:/runs", "d:/data"]), ["claimName: d", "mountPath: /data"]),
        ("partition", (["p"], ["a:1", "b:1"]), ["kind: JobSet"]),
        ("pool_label", ("a/b", "c/d"), ["c/d: p"]),
        ("gpus_per_node", (4, 8), ["nvidia.com/gpu: '8'"]),
        ("gpu_resource", ("nvidia.com/gpu", "amd.com/gpu"), ["amd.com/gpu: '4'"]),
        ("cpus", (None, 12), ["cpu: '12'"]),
        ("memory", (None, "64Gi"), ["memory: 64Gi"]),
        ("shared_memory_gib", (5, 7), ["sizeLimit: 7Gi"]),
        ("queue", (None, "team"), ["kueue.x-k8s.io/queue-name: team"]),
        ("time", (None, "10"), ["activeDeadlineSeconds: 600"]),
        ("python", ("python3", "/env/python"), ["- /env/python"]),
    )
}


SLURM: dict[str, Case] = {
    f"slurm.{key}": Case({}, _script(key, value, *lines, **beside))
    for key, value, lines, beside in (
        ("partition", ["a:1", "b:2"], ["#SBATCH --partition=a\n", "#SBATCH hetjob\n", "#SBATCH --nodes=2\n"], {}),
        ("account", "lab", ["#SBATCH --account=lab\n"], {}),
        ("qos", "high", ["#SBATCH --qos=high\n"], {}),
        ("time", "10", ["#SBATCH --time=10\n", "--signal=USR1@120\n"], {}),
        ("lead_s", 77, ["--signal=USR1@77\n"], {}),
        ("gpus_per_node", 4, ["#SBATCH --gpus-per-node=4\n"], {}),
        ("cpus_per_task", 12, ["#SBATCH --cpus-per-task=12\n", "--nodes=3 --cpus-per-task=12 bash"], {}),
        ("exclusive", True, ["#SBATCH --exclusive\n"], {"exclusive": False}),
        ("exclude", "n[3-4]", ["#SBATCH --exclude=n[3-4]\n"], {}),
        ("modules", "cuda/12.4", ["  module load cuda/12.4\n"], {}),
        ("setup", "source env.sh", ["\n  source env.sh\n"], {}),
        ("python", "/env/bin/python", ["exec /env/bin/python -m phalanx keep"], {}),
        ("container", "image.sif", ["exec apptainer exec", "image.sif python3 -m phalanx"], {}),
        ("container_by", "pyxis", ["--container-image=image.sif"], {"container": "image.sif"}),
        ("mounts", "/data", [" --bind /data "], {"container": "image.sif"}),
        ("extra", "--constraint=a100", ["#SBATCH --constraint=a100\n"], {}),
    )
}


def _arithmetic(name: str) -> Callable[[Seen, Seen], None]:
    plain = {"tf32": False, "deterministic": False}
    return equal("arithmetic", plain | {name: True}, plain)


CASES: dict[str, Case] = SLURM | KUBERNETES | {
    "model.preset": Case({}, _preset),
    "model.from_hf": Case({"model": {"from_hf": "FOLDER/exported"}}, _from_hf),
    "model.vocab_size": Case({"model.vocab_size": 310}, bigger(2 * 10 * 16)),
    "model.hidden": Case({"model.hidden": 32}, curve),
    "model.layers": Case({"model.layers": 2}, bigger(4 * 16 * 16 + 3 * 16 * 32 + 2 * 16)),
    "model.heads": Case({"model.heads": 4}, both(bigger(0), curve)),
    "model.kv_heads": Case({"model.kv_heads": 1}, bigger(-2 * 8 * 16)),
    "model.head_dim": Case({"model.head_dim": 4}, bigger(-4 * 8 * 16)),
    "model.intermediate": Case({"model.intermediate": 40}, bigger(3 * 8 * 16)),
    "model.max_seq_len": Case({"model.max_seq_len": 64}, equal("spec.max_seq_len", 64, 8)),
    "model.rope_theta": Case({"model.rope_theta": 100.0}, curve),
    "model.rope_scaling.factor": Case(ROPE | {"model.rope_scaling.factor": 2}, curve, beside="rope"),
    "model.rope_scaling.low_freq_factor": Case(
        ROPE | {"model.rope_scaling.low_freq_factor": 0.5}, curve, beside="rope"
    ),
    "model.rope_scaling.high_freq_factor": Case(
        ROPE | {"model.rope_scaling.high_freq_factor": 30}, curve, beside="rope"
    ),
    "model.rope_scaling.original_max_seq_len": Case(
        {"model.rope_scaling": {"original_max_seq_len": 32}}, curve, beside="rope"
    ),
    "model.rope_scaling.rule": Case(ROPE | {"model.rope_scaling.rule": "linear"}, curve, beside="rope"),
    "model.rope_scaling.beta_fast": Case(YARN | {"model.rope_scaling.beta_fast": 1}, curve, beside="yarn"),
    "model.rope_scaling.beta_slow": Case(YARN | {"model.rope_scaling.beta_slow": 0.01}, curve, beside="yarn"),
    "model.rope_scaling.attention_factor": Case(
        YARN | {"model.rope_scaling.attention_factor": 2}, curve, beside="yarn"
    ),
    "model.architecture": Case({"model.architecture": "qwen2"}, bigger(3 * 16)),
    "model.sliding_window": Case({"model.architecture": "mistral", "model.sliding_window": 2}, both(bigger(0), curve)),
    "model.code": Case({"model.code": "FOLDER/own.py"}, both(bigger(0), curve)),
    "model.norm_eps": Case({"model.norm_eps": 0.1}, curve),
    "model.tie_embeddings": Case({"model.tie_embeddings": True}, bigger(-300 * 16)),
    "model.init_std": Case({"model.init_std": 0.05}, curve),
    "model.dropout": Case({"model.dropout": 0.3}, curve),
    "model.attention_dropout": Case({"model.attention_dropout": 0.3}, curve),
    "model.moe.experts": Case(_moe(experts=4), both(bigger(2 * (3 * 16 * 32 + 16)), curve), beside="moe"),
    "model.moe.experts_per_token": Case(_moe(experts_per_token=1), curve, beside="moe"),
    "model.moe.intermediate": Case(_moe(intermediate=40), bigger(2 * 3 * 3 * 16 * 8), beside="moe"),
    "model.moe.scale": Case(_groups(scale=2.0), curve, beside="latent"),
    "model.moe.shared": Case(_groups(shared=1), bigger(2 * 3 * 16 * 32), beside="latent"),
    "model.moe.groups": Case(_groups(groups=4), both(bigger(0), curve), beside="latent"),
    "model.moe.groups_per_token": Case(_groups(groups_per_token=2), both(bigger(0), curve), beside="latent"),
    "model.latent": Case(LATENT | {"model.latent": [0, 14, 4, 6]}, bigger(2 * (2 * 16 + 2 + 2 * 20)), beside="latent"),
    "model.moe.renormalize": Case(_moe(renormalize=False), curve, beside="moe"),
    "model.moe.dense_layers": Case(_moe(dense_layers=[0]), bigger(-2 * 3 * 16 * 32 - 3 * 16), beside="moe"),
    "model.moe.balance": Case(_moe(balance="sequence"), gradients, beside="moe"),
    "model.moe.balance_weight": Case(_moe(balance_weight=0.1), gradients, beside="moe"),
    "model.moe.group": Case(_moe(balance="group", group=2), gradients, beside="moe"),
    "model.moe.bias_rate": Case(_groups(balance="bias", bias_rate=0.5), updates, beside="corrected"),
    "model.moe.over": Case(_moe(over="model"), gradients, beside="moe"),
    "model.moe.z_loss": Case(_moe(z_loss=0.1), gradients, beside="moe"),
    "model.lora.adapter": Case(_lora(adapter="FOLDER/adapter", rank="auto"), _adapter, beside="lora"),
    "model.lora.rank": Case(_lora(rank=3), _adapters, beside="lora"),
    "model.lora.alpha": Case(_lora(alpha=1), _adapters, beside="lora"),
    "model.lora.dropout": Case(_lora(dropout=0.3), _adapters, beside="lora"),
    "model.lora.targets": Case(_lora(targets=["q"]), _adapters, beside="lora"),
    "task.kind": Case(TASK | {"task.kind": "custom"}, both(curve, equal("tokens", [4] * 3, [32] * 3))),
    "task.code": Case(TASK | {"task.code": "FOLDER/other_task.py"}, both(bigger(0), curve), beside="own task"),
    "task.options": Case(TASK | {"task.options": {"width": 5}}, bigger(2 * 4), beside="own task"),
    "task.mask_share": Case(MASKED | {"task.mask_share": 0.4}, both(curve, more_tokens), beside="masked"),
    "task.whole_word": Case(MASKED | {"task.whole_word": True}, curve, beside="masked"),
    "task.next_sentence": Case(MASKED | {"task.next_sentence": True}, bigger(16 * 17 + 2 * 17), beside="masked"),
    "task.labels": Case(TAG | {"task.labels": ["B-W", "O", "more"]}, bigger(17), beside="tag"),
    "data.tokens_key": Case(TAG | {"data.tokens_key": "others"}, curve, beside="tag"),
    "data.tags_key": Case(TAG | {"data.tags_key": "tags"}, curve, beside="tag"),
    "data.label_key": Case(CLASSIFY | {"data.label_key": "other"}, curve, beside="classify"),
    "data.pair_key": Case(CLASSIFY | {"data.pair_key": "text"}, curve, beside="classify"),
    "data.source": Case({"data.source": "FOLDER/other.jsonl"}, curve),
    "data.tokenizer": Case({"data.tokenizer": "FOLDER/exported"}, _tokenizer),
    "data.tokenizer_vocab": Case({"data.tokenizer_vocab": 270}, bigger(-2 * 30 * 16)),
    "data.text_key": Case({"data.text_key": "title"}, curve),
    "data.validation": Case({"data.validation": {"further": "FOLDER/other.jsonl"}}, _validation),
    "data.format": Case(PROMPTS, curve),
    "data.messages_key": Case(CHAT | {"data.messages_key": "short"}, curve, beside="chat"),
    "data.prompt_key": Case(PROMPTS | {"data.prompt_key": "text"}, curve, beside="prompts"),
    "data.completion_key": Case(PROMPTS | {"data.completion_key": "title"}, curve, beside="prompts"),
    "data.chat_template": Case(CHAT | {"data.chat_template": "FOLDER/own.jinja"}, curve, beside="chat"),
    "data.loss_on": Case(PROMPTS | {"data.loss_on": "all"}, more_tokens, beside="prompts"),
    "data.too_long": Case(PROMPTS | {"data.too_long": "drop"}, curve, beside="prompts"),
    "data.mask_document_end": Case({"data.mask_document_end": True}, fewer_tokens),
    "data.isolate_documents": Case({"data.isolate_documents": True}, fewer_tokens),
    "data.held_out": Case({"data.held_out": 0.6}, _held_out),
    "data.seq_len": Case({"data.seq_len": 16}, equal("tokens", [64] * 3, [32] * 3)),
    "data.cache": Case({"data.cache": "FOLDER/elsewhere"}, _cache),
    "data.workers": Case({}, lambda base, seen: _workers()),
    "data.read_ahead": Case({"data.read_ahead": 2}, equal("reading", 2, 0), how="look", beside="looked"),
    "train.steps": Case({"train.steps": 5}, equal("step", [1, 2, 3, 4, 5], [1, 2, 3])),
    "train.epochs": Case(TASK | {"train.epochs": 2}, equal("step", [1, 2, 3, 4, 5], [1, 2, 3]), beside="own task"),
    "train.global_batch": Case({"train.global_batch": 6}, equal("tokens", [48] * 3, [32] * 3)),
    "train.rampup_batch": Case({"train.rampup_batch": [2, 1, 4]}, equal("tokens", [16, 24, 32], [32] * 3)),
    "train.micro_batch": Case({"train.micro_batch": 1}, equal("micro_batches", 4, 2), how="look", beside="looked"),
    "train.seed": Case({"train.seed": 1}, curve),
    "train.dtype": Case({"train.dtype": "fp32"}, both(curve, equal("stored", "float32", "float64"))),
    "train.tf32": Case({"train.tf32": True}, _arithmetic("tf32")),
    "train.deterministic": Case({"train.deterministic": True}, _arithmetic("deterministic")),
    "train.compile": Case({"train.compile": True}, equal("compiled", True, False), how="look", beside="looked"),
    "train.eval_every": Case(
        {"train.eval_every": 1}, lambda base, seen: _evaluations(seen, [1, 2, 3], base["evaluated"][0][1])
    ),
    "train.patience": Case(
        {"train.patience": 1, "train.eval_every": 1, "optim.lr": 1e-30}, equal("step", [1, 2], [1, 2, 3])
    ),
    "train.stop_after": Case({"train.stop_after": "0.001s"}, equal("step", [1], [1, 2, 3])),
    "train.stop_every": Case({"train.stop_every": 2}, equal("step", [1, 2], [1, 2, 3])),
    "train.eval_sequences": Case({"train.eval_sequences": 2}, lambda base, seen: _evaluations(seen, [3], 2 * 8)),
    "train.loss_scale": Case(
        {"train.dtype": "fp16", "train.loss_scale": 4.0}, equal("loss_scale", [4.0] * 3, [65536.0] * 3), beside="fp16"
    ),
    "train.fp8": Case({"train.fp8": "block"}, curve),
    "train.fp8_history": Case(DELAYED | {"train.fp8_history": 1}, gradients, beside="delayed"),
    "train.fp8_margin": Case(DELAYED | {"train.fp8_margin": 2}, updates, beside="delayed"),
    "train.loss_scale_growth_interval": Case(
        {"train.dtype": "fp16", "train.loss_scale_growth_interval": 1},
        equal("loss_scale", [65536.0, 131072.0, 262144.0], [65536.0] * 3),
        beside="fp16",
    ),
    "optim.name": Case({"optim.name": "adadelta"}, updates),
    "optim.options": Case(SGD | {"optim.options": {"momentum": 0.9}}, updates, beside="sgd"),
    "optim.lr": Case({"optim.lr": 2e-2}, both(updates, rates(lambda lr: [2 * rate for rate in lr]))),
    "optim.beta1": Case({"optim.beta1": 0.5}, updates),
    "optim.beta2": Case({"optim.beta2": 0.5}, updates),
    "optim.eps": Case({"optim.eps": 1e-2}, updates),
    "optim.weight_decay": Case({"optim.weight_decay": 5.0}, updates),
    "optim.clip_norm": Case({"optim.clip_norm": 1e-6}, updates),
    "optim.schedule": Case({"optim.schedule": "constant"}, rates(lambda lr: [1e-2] * 3)),
    "optim.power": Case(
        {"optim.schedule": "polynomial", "optim.power": 1.0}, rates(lambda lr: _falling(1 / 6)), beside="polynomial"
    ),
    "optim.decay_share": Case(WSD | {"optim.decay_share": 1.0}, rates(lambda lr: _falling(1 / 6)), beside="wsd"),
    "optim.decay_shape": Case(
        WSD | {"optim.decay_share": 1.0, "optim.decay_shape": "sqrt"},
        rates(lambda lr: _falling(1 / 6, 0.5)),
        beside="wsd",
    ),
    "optim.warmup_steps": Case({"optim.warmup_steps": 2}, lambda base, seen: _warmup(seen)),
    "optim.decay_steps": Case(
        {"optim.decay_steps": 3, "optim.schedule": "linear"}, rates(lambda lr: [7e-3, 4e-3, 1e-3])
    ),
    "optim.min_lr_ratio": Case({"optim.min_lr_ratio": 1.0}, rates(lambda lr: [1e-2] * 3)),
    "parallel.layout": Case({}, _layout),
    "parallel.engine": Case(
        {"parallel.engine": "fsdp2"}, equal("engine", "Fsdp2Engine", "SingleEngine"), how="look", beside="looked"
    ),
    "parallel.zero": Case({}, _zero),
    "parallel.grad_reduce": Case({}, _reduce),
    "parallel.shard_degree": Case({}, _shard_degree),
    "parallel.tensor": Case({}, _tensor),
    "parallel.sequence_parallel": Case({}, _sequence),
    "parallel.pipeline": Case({}, _pipeline),
    "parallel.schedule": Case({}, _schedule),
    "parallel.layers_per_stage": Case({}, _stages),
    "parallel.context": Case({}, _context),
    "parallel.context_by": Case({}, _context_by),
    "balance.context": Case({}, _context_shares),
    "parallel.expert": Case({}, _expert),
    "balance.experts": Case({}, _expert_counts),
    "balance.batch": Case({}, _work),
    "balance.optimizer_state": Case({}, _state),
    "optim.double_buffer": Case({}, _slots),
    "balance.hardware": Case({}, _hardware),
    "memory.activations": Case(
        {"memory.activations": "full"}, equal("forward_calls", 4, 2), how="look", beside="looked"
    ),
    "memory.offload_prefetch_blocks": Case(
        OFFLOAD | {"memory.offload_prefetch_blocks": 1}, _moves_twice_as_much, how="look", beside="offload"
    ),
    "comm.timeout_s": Case({}, _timeout),
    "comm.compress": Case({}, _compress),
    "checkpoint.every": Case({"checkpoint.every": 1}, equal("saved", [1, 2, 3], [3])),
    "checkpoint.keep": Case({"checkpoint.every": 1, "checkpoint.keep": 1}, equal("checkpoints", [3], [3, 2, 1]),
                            beside="saving"),
    "checkpoint.best": Case(
        {"checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.best": True, "train.eval_every": 1},
        equal("checkpoints", [3, 2], [3, 2, 1]), beside="saving",
    ),
    "resilience.max_restarts": Case({}, _max_restarts),
    "resilience.max_identical_failures": Case({}, _same_crash),
    "resilience.in_memory_checkpoints": Case({}, _in_memory),
    "resilience.replicate_every": Case({}, _replicates),
    "resilience.on_lost_node": Case(
        {}, _losses("resilience.on_lost_node", ([], ["shrink"]), (f"FinishJob {LOST}", "PrepareDivision "))
    ),
    "resilience.wait_for_node_s": Case({}, _waiting),
    "resilience.rejoin_nodes": Case({}, _growing),
    "resilience.heartbeat_timeout_s": Case({}, _heartbeat),
    "resilience.storage_timeout_s": Case({}, _storage_timeout),
    "storage.private": Case({}, _private),
    "resilience.stop_notice_s": Case({}, _stop_notice),
    "resilience.preemption_notice": Case({}, _preemption("preemption_notice", ["off", "gcp"], [("gcp", None)])),
    "resilience.metadata_url": Case(
        {},
        _preemption(
            "metadata_url", [None, "http://h:1"], [("aws", None), ("aws", "http://h:1")],
            **{"resilience.preemption_notice": "aws"},
        ),
    ),
    "resilience.health": Case({}, _health),
    "resilience.hang_timeout_s": Case({}, _hang),
    "resilience.on_nan": Case({}, _on_nan),
    "resilience.on_spike": Case({}, _on_spike),
    "resilience.spike_factor": Case({}, _spike_factor),
    "resilience.rollback_steps": Case({}, _rollback_steps),
    "resilience.checksum_every": Case({}, _checksum_every),
    "train.profile": Case({"train.profile": "2-2"}, equal("inside", ["rank-00000-steps-2-2.json.gz"], [])),
    "train.memory_snapshot": Case(
        {"train.memory_snapshot": 2}, equal("inside", ["memory-rank-00000-step-2.json"], [])
    ),
    "callback.code": Case({}, _callback),
    "callback.options": Case({}, _callback),
    "report.wandb": Case({"report.wandb": "a-project"}, equal("wandb", ["offline-run"], [])),
    "report.prometheus": Case({}, _prometheus),
    "report.webhook": Case({}, _webhook),
    "report.tensorboard": Case({"report.tensorboard": True}, equal("tensorboard", True, False)),
}  # fmt: skip


def _evaluations(seen: Seen, steps: list[int], tokens: int) -> None:
    assert [step for step, _, _ in seen["evaluated"]] == steps
    assert {count for _, count, _ in seen["evaluated"]} == {tokens}


def _falling(each: float, power: float = 1.0) -> list[float]:
    """Learning rates of three steps that each go the share `each` of the way down."""
    return [1e-2 * (0.1 + 0.9 * (1 - (step * each) ** power)) for step in (1, 2, 3)]


def _warmup(seen: Seen) -> None:
    assert seen["lr"][:2] == [5e-3, 1e-2]
    assert seen["lr"][2] < 1e-2


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Everything that the cases ask for, seen in one process: what it imports and prepares is shared."""
    folder = tmp_path_factory.mktemp("fields")
    write_text(folder)
    asked = [("base", "walk", {}), ("rope", "walk", ROPE), ("yarn", "walk", YARN)]
    asked += [("own task", "walk", TASK), ("prompts", "walk", PROMPTS), ("chat", "walk", CHAT)]
    asked += [
        ("saving", "walk", {"checkpoint.every": 1}),
        ("looked", "look", {}),
        ("offload", "look", OFFLOAD),
        ("lora", "walk", LORA),
        ("moe", "walk", MOE),
        ("latent", "walk", LATENT),
        ("corrected", "walk", _groups(balance="bias")),
    ]
    asked += [("delayed", "walk", DELAYED)]
    asked += [("fp16", "walk", {"train.dtype": "fp16"}), ("sgd", "walk", SGD), ("wsd", "walk", WSD)]
    asked += [("polynomial", "walk", {"optim.schedule": "polynomial"}), ("masked", "walk", MASKED)]
    asked += [("tag", "walk", TAG), ("classify", "walk", CLASSIFY)]
    asked += [("what fits", "walk", {"memory.activations": "auto"})]
    asked += [(key, case.how, case.changes) for key, case in CASES.items() if case.changes]
    found: dict[str, Seen] = run_ranks(observe, 1, timeout_s=280, folder=str(folder), cases=asked)[0]
    return found


def test_every_knob_has_a_case_and_every_case_a_knob() -> None:
    keys = [key for key, _ in iter_knobs()]
    assert sorted(set(keys) - set(CASES)) == [], "write a case that shows what the new knob does"
    assert sorted(set(CASES) - set(keys)) == [], "this knob is gone"


def test_the_base_run_is_sound(seen: dict[str, Seen]) -> None:
    base = seen["base"]
    assert base["code"] == 0
    assert base["step"] == [1, 2, 3]
    assert base["loss"][2] < base["loss"][0]
    assert base["checkpoints"] == [3]


def test_activations_may_be_left_to_measuring(seen: dict[str, Seen]) -> None:
    found = seen["what fits"]
    assert "error" not in found, found["error"]
    assert found["config"]["memory"]["activations"] == "none"  # what is so small fits anywhere
    assert found["loss"] == seen["base"]["loss"]


@pytest.mark.parametrize("key", sorted(CASES))
def test_another_value_changes_what_happens(key: str, seen: dict[str, Seen]) -> None:
    case = CASES[key]
    found = seen.get(key, {})
    assert "error" not in found, found["error"]
    case.check(seen[case.beside], found)
