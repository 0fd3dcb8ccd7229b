"""A dry run's numbers against a real run's: parameters, state, checkpoint, and the bytes a pass really allocates."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.autotune.dry_run import PART_LENGTHS, _dry_run, _modes, dry_run
from phalanx.autotune.fake_passes import LiveBytes, compute_activation_bytes, measure_peak_bytes
from phalanx.autotune.footprint import find_peak_bytes
from phalanx.autotune.micro_batch import find_least_zero
from phalanx.autotune.rank_bytes import in_memory_checkpoint_bytes, state_bytes
from phalanx.autotune.run_size import MODES, STATE_MEMORY_SHARE
from phalanx.config import load, resolve
from phalanx.core.placement import Placement
from phalanx.launch.dry_run_estimate import dry_run as command_dry_run
from phalanx.layout.pipeline_stages import divide_layers
from phalanx.models.families.catalog import PRESETS, parameter_count
from phalanx.models.hf_config import config_from_spec
from phalanx.models.layers import cross_entropy_sum, default_chunk
from phalanx.models.llama import Llama
from phalanx.parallel.parallelize import change_blocks
from phalanx.parallel.pipeline import build_actions
from phalanx.recovery.catalog import NEWEST
from phalanx.report import formats, run_size
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Batch
from phalanx.trainer.resolve import _resolve_memory
from phalanx.workload.workload import make_workload
from tests.dist import command
from tests.helpers import run_ranks, some
from tests.numerics import runs

MODEL = {"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab_size": 300}
KNOWN: dict[str, tuple[int, int, int]] = {}


@pytest.fixture
def unwalked(walked_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what does not depend on what a pass takes, which grows with rows and blocks here too."""

    def reckon(config: load.Config, workload: Any, grows: bool) -> tuple[int, int, int]:
        return 1 << 20, workload.positions << 16, workload.positions << 16

    monkeypatch.setattr("phalanx.autotune.dry_run.compute_activation_bytes", reckon)


@pytest.fixture(autouse=True)
def walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests ask of one model, cut in other ways: its passes with fake tensors are walked once, and of one mode."""

    def known(config: load.Config, workload: Any, grows: bool) -> tuple[int, int, int]:
        told = config.model_dump(mode="json")
        asked = [
            str(workload.spec),
            grows,
            told["train"]["dtype"],
            *(told[name] for name in ("model", "task", "data", "memory")),
        ]
        if (key := json.dumps(asked)) not in KNOWN:
            KNOWN[key] = compute_activation_bytes(config, workload, grows)
        return KNOWN[key]

    monkeypatch.setattr("phalanx.autotune.dry_run.compute_activation_bytes", known)
    walk_modes(monkeypatch, "none")


def walk_modes(monkeypatch: pytest.MonkeyPatch, *modes: str) -> None:
    monkeypatch.setattr("phalanx.autotune.dry_run.MODES", modes)


def checked(model: dict[str, Any], **sections: Any) -> load.Config:
    return load.build_config({"model": model, "data": {"seq_len": 32}, **sections}, "a recipe")


def state_of(placement: Placement, run: str, data: str, changes: dict[str, Any] | None = None) -> list[int]:
    """Elements of state that this rank holds, and bytes, in a run of the tests' recipe."""
    described = runs.job(run, data, changes or {}, placement.world)
    with runs.loop_of(placement, described) as loop:
        loop.restore()
        pieces = list(loop.setup.components.engine.pieces())
        return [
            sum(piece.tensor.numel() for piece in pieces if piece.kind == "param"),
            sum(piece.tensor.numel() * piece.tensor.element_size() for piece in pieces),
        ]


@pytest.mark.usefixtures("unwalked")
@pytest.mark.parametrize("ranks", [1, 3])
def test_state_is_what_engines_hold(ranks: int, tmp_path: Path) -> None:
    runs.write_tokens(tmp_path / "data")
    (tmp_path / "run").mkdir()
    zero = {"parallel.zero": 3} if ranks > 1 else {}  # with less of it the masters of fp64 are the parameters
    config = runs.job(tmp_path / "run", tmp_path / "data", zero, ranks).config
    found = dry_run(config, ranks)
    held = run_ranks(state_of, ranks, run=str(tmp_path / "run"), data=str(tmp_path / "data"))
    assert sum(elements for elements, _ in held) == found["model"]["parameters"] == found["model"]["trained"]
    together = sum(size for _, size in held)
    assert together == found["disk"]["checkpoint"]
    mine = found["memory"]["master weights"] + found["memory"]["optimizer state"]
    # Of the rank that holds most: the others may have the padding at a bucket's end.
    assert max(size for _, size in held) <= mine < 1.02 * max(size for _, size in held)
    assert found["host_memory"][NEWEST] == pytest.approx(2 * max(size for _, size in held), rel=0.02)
    assert dry_run(load.update_config(config, {"resilience.in_memory_checkpoints": False}), ranks)["host_memory"] == {}


@pytest.mark.usefixtures("unwalked")
def test_a_checkpoint_has_the_size_that_was_foretold(tmp_path: Path) -> None:
    runs.write_tokens(tmp_path / "data")
    runs.walk(1, tmp_path / "run", tmp_path / "data", train__steps=1)
    config = runs.job(tmp_path / "run", tmp_path / "data", {}, 1).config
    written = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints").glob("*/*.safetensors"))
    foretold = dry_run(config, 1)["disk"]["checkpoint"]
    assert foretold < written < foretold + 20_000  # the files' headers


@pytest.mark.parametrize("mode", some(["none", "selective", "full", "offload"], 1, 3))
def test_activations_are_what_a_pass_allocates(mode: str) -> None:
    """The fake pass beside a real one, whose allocations torch.profiler counts."""
    config = checked(
        MODEL, train={"dtype": "fp32", "compile": False}, memory={"activations": mode, "offload_prefetch_blocks": 1}
    )
    config, _ = resolve.resolve_autos(config, device="cpu", world=1)
    spec = recipe_spec(config)
    once, ends, block = compute_activation_bytes(config, make_workload(config, spec))
    each = ends + block * spec.layers
    measured = {batch: real_height(config, spec, batch) for batch in (2, 4)}
    assert once + 4 * each == pytest.approx(measured[4], rel=0.1)
    assert each == pytest.approx((measured[4] - measured[2]) / 2, rel=0.1)


def recipe_spec(config: load.Config) -> Any:
    from phalanx.config.model_spec import build_model_spec

    return build_model_spec(config)


def real_height(config: load.Config, spec: Any, batch: int) -> int:
    model = Llama(spec)
    mover = change_blocks(model, config, torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.register_post_accumulate_grad_hook(forget)
    tokens = torch.randint(0, spec.vocab_size, (batch, config.data.seq_len))
    data = Batch({"tokens": tokens, "labels": tokens}, tokens.numel(), torch.arange(batch))
    measure_peak_bytes(model, CausalLMTask(config.data.seq_len), data)  # what the first pass alone allocates
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = CausalLMTask(config.data.seq_len).loss_sum(model, data, None)
        loss.backward()
        del loss
    events = profiler.profiler.kineto_results.events()
    held = height = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        height = max(height, held)
    # On a CPU what went to the host is counted with the rest: all of it is there where the backward pass begins.
    return height - (0 if mover is None else mover.pool.bytes)


def forget(parameter: torch.Tensor) -> None:
    parameter.grad = None


def test_live_bytes_follow_storages_not_tensors() -> None:
    known = torch.zeros(1000)
    with LiveBytes([known]) as live:
        view = known[10:]
        assert live.now == 0
        made = view + 1
        other = made.view(10, 99)
        assert live.now == made.untyped_storage().nbytes() == 990 * 4
        del made
        assert live.now == 990 * 4
        del other
        assert live.now == 0
    assert live.peak == 990 * 4


@pytest.mark.parametrize(("tokens", "frozen"), [(40, False), (57, False), (57, True)])
def test_three_chunks_of_the_loss_tell_what_all_take(tokens: int, frozen: bool) -> None:
    """Also where the last one is shorter."""
    peaks = []
    for few in (False, True):
        with FakeTensorMode():
            hidden = torch.empty(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(300, 16, dtype=torch.bfloat16, requires_grad=not frozen)
            labels = torch.empty(tokens, dtype=torch.int64)
            with LiveBytes([hidden, weight, labels]) as live:
                cross_entropy_sum(hidden, weight, labels, chunk=8, sizes_only=few).backward()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] > 8 * 300 * 10


@pytest.mark.parametrize("preset", some(["llama-3-8b", "llama-3.1-405b"], 0))
def test_presets_take_no_memory(preset: str) -> None:
    config = load.build_config({"model": {"preset": preset}, "data": {"seq_len": 8192}}, "a recipe")
    found = dry_run(config, 64)
    count = parameter_count(PRESETS[preset])
    assert found["model"]["parameters"] == sum(found["model"]["parts"].values()) == count
    assert found["disk"]["checkpoint"] == 12 * count
    assert found["memory"]["master weights"] == 4 * count // 64
    assert found["work"]["tokens_per_step"] == 32 * 8192
    assert found["work"]["flops"] == found["work"]["flops_per_token"] * found["work"]["tokens"]
    assert found["memory_total"] == sum(found["memory"].values())


def test_the_command_prints_what_was_found_and_touches_no_data(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model": MODEL, "data": {"source": "gone.jsonl", "seq_len": 32}}))
    code, out, err = command.phalanx(tmp_path, "train", "recipe.yaml", "--dry-run", "--ranks", "2", "--json")
    assert code == 0, err
    assert json.loads(out) == {**command_dry_run(load.load_recipe(tmp_path / "recipe.yaml"), 2), "planned": None}
    assert os.listdir(tmp_path) == ["recipe.yaml"]


def test_the_tables_hold_every_number(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    walk_modes(monkeypatch, *some(MODES, 0, 1, 2))
    found = dry_run(checked(MODEL | {"layers": 8}), 2)
    run_size.print_run_size(found)
    modes = found["sequence"]
    assert modes["none"] > modes["selective"] > modes["full"] and modes["none"] > 2 * modes["full"]
    text = capsys.readouterr().out
    assert "memory of one of 2 ranks" in text
    assert f"{found['model']['parameters']:,}" in text
    tables = [found[name] for name in ("memory", "host_memory", "sequence")]
    for value in (found["memory_total"], *(value for table in tables for value in table.values())):
        assert formats.format_bytes(value) in text
    assert f"{formats.format_bytes(found['disk']['checkpoint'])}, {found['disk']['checkpoints_kept']} kept" in text
    assert "a replica, on several nodes" in text
    assert "train.micro_batch is auto" in text
    assert "allow a fifth of the device" in text


def test_a_chat_takes_hardly_more_than_text_of_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    walk_modes(monkeypatch, *some(["none", "full"], 0))
    text, chat = (dry_run(checked(MODEL, data={"seq_len": 32, "format": kind}), 1) for kind in ("text", "chat"))
    for mode, taken in text["sequence"].items():
        assert taken < chat["sequence"][mode] < 1.1 * taken  # a row has rotary tables of its own


@pytest.mark.usefixtures("unwalked")
@pytest.mark.parametrize("scheme", some(["", "file://"], 0))
def test_of_a_hugging_face_folder_the_config_is_enough(scheme: str, tmp_path: Path) -> None:
    spec = recipe_spec(checked(MODEL))
    (tmp_path / "config.json").write_text(json.dumps(config_from_spec(spec, torch.bfloat16)))
    lora = {"rank": 4, "targets": ["q", "down"]}
    found = dry_run(checked({"from_hf": f"{scheme}{tmp_path}", "lora": lora}), 1)
    adapters = 3 * 4 * ((64 + 64) + (96 + 64))
    assert found["model"]["trained"] == found["model"]["parts"]["adapters"] == adapters
    assert found["model"]["parameters"] == parameter_count(spec) + adapters
    assert found["disk"]["checkpoint"] == 12 * adapters
    assert found["memory"]["frozen weights"] == 2 * parameter_count(spec)
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.usefixtures("unwalked")
def test_labels_that_only_the_data_know_are_reckoned_as_two() -> None:
    tree = {"task": {"kind": "tag"}, "data": {"tokenizer": "train", "tokenizer_vocab": 300, "source": "nowhere.txt"}}
    shape = {"architecture": "bert", "hidden": 64, "layers": 1, "heads": 4, "intermediate": 96}
    found = dry_run(checked(shape, **tree), 1)
    assert found["model"]["parts"]["head"] == 2 * 64 + 2
    assert any("task.labels is auto" in note for note in run_size.size_notes(found["assumed"]))
    named = dry_run(checked(shape, **{**tree, "task": {"kind": "tag", "labels": ["O", "B-X", "I-X"]}}), 1)
    assert named["model"]["parts"]["head"] == 3 * 64 + 3
    assert not any("task.labels" in note for note in run_size.size_notes(named["assumed"]))


@pytest.mark.usefixtures("unwalked")
def test_it_says_which_zero_is_taken_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    config = checked(MODEL | {"layers": 12}, train={"dtype": "fp32"})
    found = dry_run(config, 4)
    needs = found["assumed"]["zero_needs"]
    reckoned, auto = run_size.size_notes(found["assumed"])[:2]
    assert "engine sharded with parallel.zero 1," in reckoned
    assert auto.startswith(
        f"parallel.zero is auto: the run takes 1 where each rank has {formats.format_bytes(needs['1'])} free"
    )
    config, _ = resolve.resolve_autos(config, device="cpu", world=4)
    workload = make_workload(config, recipe_spec(config))
    of_cpus: dict[str, Any] = {"world": 4, "local_world": 4}
    # Steps are kept beside that where ranks compute in the same memory, as those of CPUs do.
    kept = [
        in_memory_checkpoint_bytes(
            load.update_config(config, {"parallel.zero": zero}), workload, torch.device("cpu"), free=1 << 62, **of_cpus
        )
        / STATE_MEMORY_SHARE
        for zero in (1, 2, 3)
    ]
    assert min(kept) > 0
    for keeps in (False, "auto"):
        config = load.update_config(config, {"resilience.in_memory_checkpoints": keeps})
        needed = [needs[str(zero)] + kept[zero - 1] * (keeps == "auto") for zero in (1, 2)]
        for free, taken in ((1.01 * needed[0], 1), (0.99 * needed[0], 2), (0.99 * needed[1], 3)):
            monkeypatch.setattr("phalanx.system.accelerator.memory_free", lambda *_, free=free: free)
            assert find_least_zero(config, workload, ["cpu"], **of_cpus) == taken
    # Where the steps and their replicas fit with none, they are no reason to send more.
    of_nodes, most = of_cpus | {"local_world": 2}, load.update_config(config, {"parallel.zero": 3})
    takes = in_memory_checkpoint_bytes(most, workload, torch.device("cpu"), free=1 << 62, **of_nodes)
    least = (state_bytes(most, workload, torch.device("cpu"), 4) + takes) / STATE_MEMORY_SHARE
    for share, taken in ((1.01, 3), (0.99, 1)):
        monkeypatch.setattr("phalanx.system.accelerator.memory_free", lambda *_, share=share: share * least)
        assert find_least_zero(config, workload, ["cpu"], **of_nodes) == taken
    fixed = run_size.size_notes(dry_run(checked(MODEL, parallel={"zero": 3}), 4)["assumed"])
    assert "engine sharded with parallel.zero 3," in fixed[0]
    assert not any("is auto: the run takes 1" in note for note in fixed)
    assert "parallel.zero" not in " ".join(run_size.size_notes(dry_run(checked(MODEL), 1)["assumed"]))


LAYOUT = {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.layers_per_stage": [1, 1]}


@pytest.mark.usefixtures("unwalked")
def test_of_a_layout_the_fullest_rank_is_told(tmp_path: Path) -> None:
    """Four ranks with a quarter of the model each, but no two quarters alike."""
    runs.write_tokens(tmp_path / "data")
    (tmp_path / "run").mkdir()
    config = runs.job(tmp_path / "run", tmp_path / "data", LAYOUT, 4).config
    found = dry_run(config, 4)
    held = run_ranks(state_of, 4, run=str(tmp_path / "run"), data=str(tmp_path / "data"), changes=LAYOUT)
    (first, last), fullest = found["layout"]["ranks"], found["memory"]
    # Ranks are numbered slice by slice, then stage by stage; the largest slice is the last.
    assert [elements for elements, _ in held[1::2]] == [first["parameters"], last["parameters"]]
    assert first["parameters"] != last["parameters"]
    assert sum(elements for elements, _ in held) > found["model"]["parameters"]  # norms are on two ranks
    assert found["memory_total"] == max(first["memory"], last["memory"]) == sum(fullest.values())
    state = max(size for _, size in held) - 8 * max(elements for elements, _ in held)
    assert state <= fullest["optimizer state"] < 1.1 * state  # with the padding of small buckets
    printed = run_size._layout(found["layout"])
    assert printed[0] == ("ranks", "pipeline 2 (1f1b) x tensor 2 with sequence x 1 copy")
    assert [name for name, _ in printed[1:]] == ["place 0: layers 0", "place 1: layers 1"]


def test_the_longest_row_fills_the_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(length: int) -> load.Config:
        shared = {"context": 4, "context_by": "gather", "zero": 3}
        preset = {"preset": "llama-3.2-1b", "layers": 2, "max_seq_len": 1 << 22, "vocab_size": 65536}
        train = {"global_batch": 8, "micro_batch": 1}
        return checked(preset, data={"seq_len": length}, parallel=shared, train=train)

    monkeypatch.setattr("phalanx.autotune.run_size.DEVICE_GIB", (2, 16, 80))
    monkeypatch.setattr("phalanx.autotune.dry_run.PART_LENGTHS", tuple(some(PART_LENGTHS, 0, 4)))
    short = dry_run(asked(8192), 4)
    assert short["longest_rows"]["2"] == 0
    for gib in some([16, 80], 1):  # rows of which the loss takes a good part, and rows of which blocks take most
        there = _dry_run(asked(short["longest_rows"][str(gib)]), 4)
        assert there["memory_total"] == pytest.approx(0.8 * gib * 2**30, rel=0.05)
    run_size.print_run_size(short)
    assert f"{formats.format_count(short['longest_rows']['80'])} positions" in capsys.readouterr().out


def test_the_loss_takes_no_less_for_longer_rows() -> None:
    """Around a chunk of the loss, where as many tokens in equal chunks have fewer in each; of two ranks' halves."""
    preset = {"preset": "llama-3.2-1b", "layers": 2, "max_seq_len": 1 << 17}
    chunk = default_chunk(128256, torch.device("meta"))
    lengths = [chunk // 2, chunk - 1, chunk, chunk + 1, 3 * chunk // 2, 2 * chunk + 1, 8 * chunk]
    lengths = some(lengths, 2, 3)
    found = [
        _dry_run(
            checked(
                preset,
                data={"seq_len": 2 * length},
                train={"global_batch": 2, "micro_batch": 1},
                parallel={"context": 2, "context_by": "ring"},
            ),
            2,
            ["none"],
        )
        for length in lengths
    ]
    losses = [each["memory"]["loss and the head's gradient"] for each in found]
    assert losses == sorted(losses)


@pytest.mark.usefixtures("unwalked")
def test_a_table_of_positions_ends_the_longest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.autotune.dry_run.PART_LENGTHS", (4096, 16384))
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "vocab_size": 300, "max_seq_len": 512}
    sections = {
        "data": {"seq_len": 256}, "train": {"global_batch": 2, "micro_batch": 1},
        "parallel": {"context": 2, "context_by": "gather"},
    }  # fmt: skip
    fresh = checked({"architecture": "gpt2", **sizes}, **sections)
    assert dry_run(fresh, 2)["longest_rows"]["80"] > 512  # with a table of as many rows
    (tmp_path / "config.json").write_text(json.dumps(config_from_spec(recipe_spec(fresh), torch.bfloat16)))
    trained = checked({"from_hf": str(tmp_path)}, **sections)
    assert dry_run(trained, 2)["longest_rows"]["80"] == 512


def test_a_layout_of_a_large_model_fits_where_its_quarter_would() -> None:
    """Who holds the head holds more than an even part; more micro-batches of the first stage are under way."""
    config = checked({"preset": "llama-3-70b"}, train={"global_batch": 64, "micro_batch": 1}, parallel={
        "tensor": 8, "pipeline": 4, "engine": "sharded", "zero": 1,
    })  # fmt: skip
    found = _dry_run(config, 64, ["none"])
    ranks = found["layout"]["ranks"]
    numbers = [stop - start for rank in ranks for _, start, stop in rank["stages"]]
    assert sum(numbers) == 80 and numbers[-1] < 20
    assert found["layout"]["copies"] == 2
    assert sum(rank["parameters"] for rank in ranks) == pytest.approx(found["model"]["parameters"] / 8, rel=1e-3)
    assert list(_modes(config)) == ["none", "selective", "full"]  # offload does not go with a pipeline
    whole = dry_run(checked({"preset": "llama-3-70b"}, train={"micro_batch": 1}), 1)
    assert whole["layout"] is None
    assert found["memory_total"] < whole["memory_total"] / 16


@pytest.mark.usefixtures("unwalked")
@pytest.mark.parametrize("zero", ["auto", 2])
def test_stages_that_hardly_fit_reduce_once_a_step(zero: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `parallel.zero: auto` of a pipeline becomes may be combined with it, however little memory there is."""
    config = checked(MODEL, parallel={"pipeline": 2, "zero": zero}, train={"micro_batch": 1, "dtype": "fp32"})
    assert dry_run(config, 4)["assumed"]["zero_needs"] == {}
    config, _ = resolve.resolve_autos(config, device="cpu", world=4)
    workload = make_workload(config, recipe_spec(config))
    monkeypatch.setattr("phalanx.system.accelerator.memory_free", lambda *_: 1.0)
    chosen = {key: value for key, value, _ in _resolve_memory(config, workload, ["cpu"], 4, 4)}
    assert chosen.get("parallel.zero", zero) == (1 if zero == "auto" else 2)
    assert chosen["parallel.grad_reduce"] == "per_step"
    load.update_config(config, chosen)  # which checks it


def test_activations_under_way() -> None:
    plan = divide_layers(8, 4, "1f1b")
    kept = [find_peak_bytes(build_actions("1f1b", plan, 16)[rank], {rank: 10}) for rank in range(4)]
    assert kept == [40, 30, 20, 10]  # one for each stage from here on
    assert [find_peak_bytes(build_actions("gpipe", plan, 16)[rank], {rank: 10}) for rank in range(4)] == [160] * 4
    two = divide_layers(8, 2, "zero_bubble")
    at_most = [
        find_peak_bytes(build_actions("zero_bubble", two, 16)[rank], dict.fromkeys(two.stages_of(rank), 5))
        for rank in range(2)
    ]
    assert max(at_most) <= 2 * 2 * 5 + 5  # about as much as 1f1b keeps
