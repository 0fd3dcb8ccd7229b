"""Recipes with expert parallelism: what is refused, how ranks form groups, and which rank holds how many experts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from phalanx.autotune import measure
from phalanx.autotune.footprint import make_all_footprints, make_rank_footprint
from phalanx.autotune.micro_batch import bytes_of_more_rows
from phalanx.autotune.rank_bytes import find_state_layout, state_items
from phalanx.config import load
from phalanx.config.model_spec import decide_experts
from phalanx.config.resolve import resolve_autos
from phalanx.core.errors import ConfigError
from phalanx.launch.node_session import make_policy
from phalanx.layout.balance import Speed
from phalanx.layout.buckets import GRANULE
from phalanx.layout.memory_model import ON_THEIR_WAY
from phalanx.layout.mesh_axes import MeshAxes
from phalanx.models.families.catalog import PRESETS
from phalanx.models.moe import MoEDecoder
from phalanx.parallel.parallelize import change_blocks
from phalanx.workload.expert_counts import find_expert_counts
from phalanx.workload.workload import make_workload, read_model_shape
from tests.unit.test_hardware import unlike

MODEL = {
    "architecture": "mixtral", "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 44,
    "vocab_size": 61, "moe": {"experts": 5, "experts_per_token": 2},
}  # fmt: skip


def config_of(changes: dict[str, Any], **model: Any) -> Any:
    tree: dict[str, Any] = {"model": MODEL | model, "data": {"seq_len": 16}}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return load.build_config(tree, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.expert": 1, "balance.experts": [1, 2]}, "balance.experts has no effect with parallel.expert 1"),
        ({"balance.experts": [1, 2, 3]}, "balance.experts has 3 numbers"),
        ({"parallel.engine": "fsdp2"}, "parallel.engine fsdp2 cannot be combined with parallel.expert 2"),
        ({"parallel.shard_degree": 2}, "parallel.shard_degree 2 cannot be combined"),
        ({"parallel.pipeline": 2, "parallel.schedule": "zero_bubble"}, "parallel.schedule zero_bubble cannot be"),
        ({"train.compile": True, "memory.activations": "selective"}, "train.compile true with memory.activations sel"),
        ({"comm.compress": "bf16"}, "comm.compress bf16 cannot be combined"),
        ({"resilience.checksum_every": 5}, "resilience.checksum_every 5, which compares what all ranks hold, cannot"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of({"parallel.expert": 2} | changes)


def test_a_model_needs_experts_for_all_ranks() -> None:
    with pytest.raises(ConfigError, match="the model has none"):
        read_model_shape(config_of({"parallel.expert": 2}, architecture="llama", moe={}))
    with pytest.raises(ConfigError, match=r"parallel.expert 6 is more than the model's 5 experts"):
        read_model_shape(config_of({"parallel.expert": 6}))
    with pytest.raises(ConfigError, match=r"parallel.expert 3 x parallel.tensor 2 are more than the model's 5 experts"):
        read_model_shape(config_of({"parallel.expert": 3, "parallel.tensor": 2}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"balance.experts": [1, 2]}, "balance.experts has 2 numbers, but parallel.expert is 2 and parallel.tensor 2"),
        ({"train.fp8": "block", "parallel.expert": 1}, "train.fp8 block does not multiply experts that"),
        (
            {"parallel.expert": 1, "train.compile": True, "memory.activations": "selective"},
            "selective cannot be combined with experts that parallel.tensor 2 divides",
        ),
    ],
)
def test_experts_that_tensor_ranks_divide_have_limits(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of({"parallel.expert": 2, "parallel.tensor": 2} | changes)


def test_widths_that_tensor_ranks_cut_divide() -> None:
    latent: dict[str, Any] = {"architecture": "deepseek_v3", "latent": [0, 12, 4, 6], "kv_heads": 4}
    moe: dict[str, Any] = {"experts": 5, "experts_per_token": 2, "intermediate": 45}
    config_of({"parallel.tensor": 2}, moe=moe, intermediate=45)  # experts are not cut
    for more in ({"shared": 1}, {"dense_layers": [0]}):
        with pytest.raises(
            ConfigError, match=r"parallel.tensor=2 does not divide model\.(moe.shared x|intermediate=45)"
        ):
            config_of({"parallel.tensor": 2}, **latent, moe=moe | more, intermediate=45)
    with pytest.raises(ConfigError, match=r"balance.experts has no effect on a model without experts"):
        config_of({"parallel.tensor": 2, "balance.experts": [1, 2]}, architecture="llama", moe={})


def test_ranks_must_form_groups() -> None:
    asked = config_of({"parallel.expert": 2})
    with pytest.raises(ConfigError, match=r"3 ranks cannot form groups of 2 ranks that hold all experts together"):
        resolve_autos(asked, device="cpu", world=3)
    selective = config_of({"parallel.expert": 2, "memory.activations": "selective"})
    cut = config_of({"parallel.tensor": 2, "memory.activations": "selective"})
    assert [resolve_autos(each, device="cuda", world=4)[0].train.compile for each in (asked, selective, cut)] == [
        "auto",
        False,
        False,
    ]
    axes = MeshAxes(expert=2)
    assert (list(axes.groups("expert", 4)), list(axes.groups("expert_copies", 4))) == (
        [(0, 1), (2, 3)],
        [(0, 2), (1, 3)],
    )
    both = MeshAxes(expert=2, tensor=2)
    assert list(both.groups("expert", 8)) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(both.groups("expert_copies", 8)) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [both.expert_place(both.coordinates(rank, 8)) for rank in range(8)] == [0, 1, 2, 3] * 2
    # After a loss a run goes on with whole groups.
    rows = config_of({"parallel.context": 2}, architecture="llama", moe={})
    assert make_policy(asked, 2).group == make_policy(rows, 2).group == 2
    assert asked.parallel.lockstep and not config_of({}).parallel.lockstep


def test_faster_ranks_hold_more_experts() -> None:
    config, speeds = config_of({"parallel.expert": 2}), [Speed(1.0), Speed(4.0), Speed(1.0), Speed(2.0)]
    spec = read_model_shape(config)
    assert find_expert_counts(config, spec) == (3, 2)
    assert find_expert_counts(config, spec, speeds) == (4, 1)  # ranks 1 and 3 hold the same, and 1 is the slower
    assert find_expert_counts(config_of({"parallel.expert": 2, "balance.experts": "even"}), spec, speeds) == (3, 2)
    assert find_expert_counts(config_of({"parallel.expert": 2, "balance.experts": [0, 7]}), spec, speeds) == (0, 5)
    assert find_expert_counts(config_of({}), spec, speeds) == ()
    both = config_of({"parallel.expert": 2, "parallel.tensor": 2})  # ranks of a copy are alike
    assert find_expert_counts(both, spec, [Speed(1.0), Speed(4.0)]) == (2, 2, 1, 0)


def test_a_footprint_has_the_experts_of_its_rank() -> None:
    config = config_of({"parallel.expert": 2, "balance.experts": [1, 4]})
    subject = make_workload(config, read_model_shape(config))
    stacks = [
        footprint.model.get_parameter("layers.1.mlp.experts.gate_up").shape[0]
        for footprint in (*make_all_footprints(subject, config), make_rank_footprint(subject, config, 0, 0))
    ]
    assert stacks == [4, 1]


def test_experts_that_are_gathered_in_fp8_are_counted() -> None:
    """Two ranks hold each expert: their parts of it travel in a byte an element, as the other matrices do."""
    keys = {"parallel.expert": 2, "parallel.zero": 3, "train.dtype": "fp32", "train.micro_batch": 2}
    found = {}
    for fp8 in ("none", "block"):
        config = resolve_autos(config_of(keys | {"train.fp8": fp8}), device="cpu", world=4)[0]
        workload = make_workload(config, read_model_shape(config))
        layout = find_state_layout(config, torch.device("cpu"), 4)
        model = make_rank_footprint(workload, config, 0, 0).model
        found[fp8] = state_items(model, workload.spec, layout, 0)
    stacks = 3 * 3 * 32 * 44  # of three of the five experts
    coded = -(-stacks // (2 * GRANULE)) * 2 * GRANULE  # the largest bucket, padded
    assert found["block"] == found["none"] | {ON_THEIR_WAY: found["none"].get(ON_THEIR_WAY, 0) + 2 * coded}


def test_room_is_what_the_experts_that_speeds_give_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    known, asked, nothing = unlike(0.1, 0.4, model="another"), list[Any](), cast(Any, None)
    monkeypatch.setattr(measure, "_measure_once", lambda *args, turn: (known, lambda counts: asked.append(counts) or 3))
    mesh = cast(Any, SimpleNamespace(rank=0, gather=lambda mine: [float(mine), 9.0]))
    for experts, wanted, most in (("auto", [(4, 1)], [3, 9]), ("even", [], [known.devices[0].most] * 2)):
        asked.clear()
        config = config_of({"parallel.expert": 2, "balance.experts": experts, "train.dtype": "fp32"})
        subject = make_workload(config, read_model_shape(config))
        found = measure.measure_devices(config, subject, nothing, mesh, print)
        assert (asked, [device.most for device in found.devices]) == (wanted, most)
    held = make_rank_footprint(subject, config, 0, 0, (4, 1)).model
    assert held.get_parameter("layers.1.mlp.experts.gate_up").shape[0] == 4
    # 16 positions with 2 experts each are 32 rows; of twice as many this rank gets four fifths.
    layers = 2 if config.memory.activations in ("none", "selective") else 1
    assert bytes_of_more_rows(config, subject, (4, 1), 0) == (64 * 4 // 5 - 32) * (2 * 32 + 4 * 44) * 4 * layers
    assert bytes_of_more_rows(config, subject, (4, 1), 1) == 0


def test_blocks_that_are_recomputed_are_compiled_around_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compile_it = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: compile_it(function, backend=counter, **kwargs))
    config = config_of({"parallel.expert": 2, "train.compile": True, "memory.activations": "full"})
    model = MoEDecoder(read_model_shape(config))
    for block in model.blocks():
        block.get_submodule("mlp.experts").exchange = lambda feed, rows, counts: feed(rows, counts)  # type: ignore[assignment]
    change_blocks(model, config, torch.device("cpu"))
    model(torch.arange(16)[None])
    assert counter.frame_count


def test_a_weight_of_no_loss_is_refused() -> None:
    """Of a folder that asks for none, where the recipe does not say by what experts are balanced."""
    spec = PRESETS["mixtral-8x7b"]
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, balance="none"))
    keys: dict[str, Any] = {"balance_weight": 0.1}
    asked = load.build_config({"model": {"from_hf": "mixtral", "moe": keys}}, "here")
    with pytest.raises(ConfigError, match=r"asks for no loss \(output_router_logits\); set model.moe.balance, or rem"):
        decide_experts(asked, spec)
    asked = load.build_config({"model": {"from_hf": "mixtral", "moe": keys | {"balance": "sequence"}}}, "here")
    assert [each[:2] for each in decide_experts(asked, spec)] == [("model.moe.over", "layer")]
    with pytest.raises(ConfigError, match=r"the model of model.from_hf has no experts; remove model.moe"):
        decide_experts(asked, PRESETS["llama-3-8b"])
