"""Recipes: what is read, what is refused and in which words, and how a run folder's configuration is taken up."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.config import load, resolve
from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.config.validation import find_unused_keys
from phalanx.core.errors import ConfigError
from phalanx.models.families.catalog import PRESETS
from tests.helpers import ALL, ROOT

SHAPE = {"hidden": 16, "layers": 1, "heads": 2}
KEYS = [key for key, _ in iter_knobs()]
FOLDER = Path("runs/demo")
GOOD = "model: {hidden: 16, layers: 1, heads: 2}\n"


def tree(**sections: Any) -> dict[str, Any]:
    return {"model": dict(SHAPE), **sections}


def read(text: str, *overrides: str) -> Config:
    return load.build_config(load.apply_overrides(load.parse_yaml(text, "r.yaml"), overrides), "r.yaml")


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------- what is accepted


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000), ("1.5e3", 1500), ("2E+2", 200), ("5e0", 5), ("'7'", 7), ("8.0", 8)]
)
def test_a_number_with_an_exponent_is_whole_where_its_value_is(text: str, value: int) -> None:
    assert read(GOOD, f"train.steps={text}").train.steps == value
    assert read(f"{GOOD}train: {{steps: {text}}}").train.steps == value


def test_exponents_are_numbers_wherever_a_recipe_has_some() -> None:
    config = read(GOOD, "balance.batch=[1e0, 15]", "train.global_batch=16", "optim.lr=1e-3")
    assert (config.balance.batch, config.optim.lr) == ([1, 15], 1e-3)
    of_task = load.parse_yaml("task: {options: {width: 1e3, rate: 1e-3}}", "r.yaml")["task"]["options"]
    assert of_task == {"width": 1000, "rate": 1e-3} and type(of_task["width"]) is int
    assert "train.steps must be a whole number, not 12.5" in refusal(GOOD, "train.steps=1.25e1")
    assert "train.steps must be a finite number, not inf" in refusal(GOOD, "train.steps=1e400")


def test_text_that_looks_like_such_a_number_is_text_again_when_it_was_saved() -> None:
    config = read(GOOD, "data.source='1e3'")
    assert config.data.source == ["1e3"]
    assert read(load.to_yaml(config)) == config
    assert yaml.safe_load(load.to_yaml(config))["data"]["source"] == ["1e3"]


def test_anchors_and_merged_keys_work() -> None:
    config = read(
        "train: &t {steps: 7, seed: 3}\n" + GOOD.replace("{", "{<<: &s {layers: 9, kv_heads: 1}, ") + "data: {}"
    )
    assert (config.model.layers, config.model.kv_heads) == (1, 1)  # its own keys win over merged ones
    assert read("\ufeff" + GOOD + "optim: {lr: 1e-3}").optim.lr == 1e-3  # YAML 1.1 takes this number for text


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 1e-3),
        ("optim.lr=1E-3", "optim.lr", 1e-3),
        ("optim.lr=3", "optim.lr", 3.0),
        ("optim.clip_norm=null", "optim.clip_norm", None),
        ("optim.clip_norm=~", "optim.clip_norm", None),
        ("train.steps=12", "train.steps", 12),
        ("train.steps='12'", "train.steps", 12),
        ("train.micro_batch=auto", "train.micro_batch", "auto"),
        ("train.compile=false", "train.compile", False),
        ("data.source=[a.txt, 'b c.txt']", "data.source", ["a.txt", "b c.txt"]),
        ("data.source=a.txt", "data.source", ["a.txt"]),
        ("data.text_key=", "data.text_key", ""),
        ("data.text_key=a=b", "data.text_key", "a=b"),
        ("model.rope_scaling.factor=2", "model.rope_scaling.factor", 2.0),
        ("model.rope_scaling={factor: 3}", "model.rope_scaling.factor", 3.0),
        ("report={tensorboard: false}", "report.tensorboard", False),
    ],
)
def test_an_override_is_typed_as_in_the_recipe(override: str, key: str, value: object) -> None:
    found = get_knob(read(GOOD, override), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optim.lr"], "`optim.lr` does not have the form section.key=value, such as optim.lr=3e-4"),
        (["=3"], "does not have the form"),
        (["train.=3"], "does not have the form"),
        (["train..steps=3"], "does not have the form"),
        ([".steps=3"], "does not have the form"),
        ([""], "does not have the form"),
        (["steps=3"], "unknown key steps; did you mean train.steps?"),
        (["train.stps=3"], "unknown key train.stps; did you mean train.steps?"),
        (["train.steps=[3"], "the value of `train.steps=[3`, line 1: not valid YAML"),
        (["train.steps=" + "[" * 1000], "nested too deeply"),
        (["train.steps=!!python/name:os.system x"], "not valid YAML"),
        (["train.steps=!!int ''"], "cannot be read as a YAML int"),
        (["train={steps: 1, steps: 2}"], "appears twice"),
        (["train.steps.deeper=3"], "train.steps must be a whole number, not {'deeper': 3}"),
        (["model.hidden.x=3"], "cannot be set: model.hidden is a number without keys"),
        (["train=fast", "train.steps=3"], "cannot be set: train is text without keys"),
        (["model.kv_heads=3"], "model.heads is 2 and model.kv_heads is 3"),
    ],
)
def test_a_wrong_override_is_a_sentence(overrides: list[str], sentence: str) -> None:
    assert sentence in (found := refusal(GOOD, *overrides))
    assert "\n" not in found and len(found) < 400


EXPERTS = "model: {hidden: 16, layers: 1, heads: 2, architecture: mixtral, moe: {experts: 4, experts_per_token: 2}}\n"


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        (EXPERTS, ["model.moe.capacity=2", "parallel.expert=2"], "unknown key model.moe.capacity; "),
        (EXPERTS, ["model.moe.balance=sinkhorn", "parallel.expert=2"], "model.moe.balance must be "),
        (EXPERTS, ["model.architecture=llama"], "model.moe is set, but model.architecture llama has no experts"),
        (GOOD, ["model.moe.balance=step"], "model.moe is set, but the model has no experts"),
    ],
)
def test_one_mistake_is_one_sentence(text: str, overrides: list[str], sentence: str) -> None:
    assert sentence in (found := refusal(text, *overrides))
    assert "\n" not in found


def test_a_later_override_wins_and_the_tree_is_left_alone() -> None:
    before = tree(train={"steps": 1})
    copy = yaml.safe_load(yaml.safe_dump(before))
    after = load.apply_overrides(before, ["train.steps=2", "train.seed=5", "train.steps=3", "model.layers=4"])
    assert before == copy
    assert after == {"model": SHAPE | {"layers": 4}, "train": {"steps": 3, "seed": 5}}


# ------------------------------------------------------------------------------------------------------ any tree at all

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [1, 2, 4, 16, 64, 2**53, 1e-300, 1e300, 0.5, "auto", "train", "llama-3-8b", True, None, [], {}]
)


@st.composite
def nearly_recipes(draw: st.DrawFn) -> dict[Any, Any]:
    """Trees with real sections and real keys, and values that are likely, odd or absurd."""
    made: dict[Any, Any] = {}
    for key in draw(st.lists(st.sampled_from([*KEYS, "train.x", "x.y", "model.rope_scaling.x"]), max_size=6)):
        node = made
        *parents, leaf = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                break
        else:
            node[leaf] = draw(LIKELY | ANYTHING)
    return made


@settings(max_examples=400 if ALL else 100, deadline=None)
@given(nearly_recipes() | st.dictionaries(st.sampled_from([*Config.model_fields, "x"]) | st.integers(), ANYTHING))
@example({"model": {"hidden": 2**53, "layers": 2**53, "heads": 2**53, "max_seq_len": 1}})
@example({"model": {"preset": "llama-3-8b", "rope_scaling": {"factor": 5e-324, "original_max_seq_len": 2**53}}})
def test_any_tree_is_a_configuration_or_a_sentence(made: dict[Any, Any]) -> None:
    try:
        config = load.build_config(made, "here")
    except ConfigError as error:
        found = str(error)
    else:
        found = "here"
        assert load.build_config(yaml.safe_load(load.to_yaml(config)), "again") == config
    assert found.startswith("here")
    assert all(len(line) < 1000 for line in found.splitlines())


@settings(max_examples=200 if ALL else 50, deadline=None)
@given(st.text(max_size=60) | st.text("{}[]&*!:-? \n'\"#a1|>%@`", max_size=30))
def test_any_text_is_a_mapping_or_a_sentence(text: str) -> None:
    try:
        found = "here" if isinstance(load.parse_yaml(text, "here"), dict) else "neither"
    except ConfigError as error:
        found = str(error)
    assert found.startswith("here")
    assert "\n" not in found


# ----------------------------------------------------------------------------------------------- resolving and going on


@given(
    st.fixed_dictionaries(
        {
            "lr": st.floats(1e-300, 1e300),
            "eps": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
            "clip_norm": st.none() | st.floats(1e-9, 1e9),
        }
    ),
    st.lists(st.text(min_size=1).filter(lambda text: "\0" not in text), min_size=1, max_size=3),
    st.integers(0, 2**53),
)
@settings(max_examples=100 if ALL else 25, deadline=None)
def test_what_is_written_is_read_back(optim: dict[str, float], source: list[str], seed: int) -> None:
    config = load.build_config(
        tree(optim=optim, data={"source": source, "cache": source[0]}, train={"seed": seed}), "here"
    )
    written = load.to_yaml(config)
    assert load.build_config(load.parse_yaml(written, "there"), "there") == config == load.from_yaml(written, "there")


def test_auto_is_resolved_by_device_and_world() -> None:
    config = load.build_config(tree(train={"steps": 70}), "here")
    resolved, chosen = resolve.resolve_autos(config, device="cpu", world=1)
    assert {key: value for key, value, _ in chosen} == {
        "task.kind": "language",
        "train.dtype": "fp32",
        "train.compile": False,
        "optim.decay_steps": 70,
        "optim.weight_decay": 0.1,
        "parallel.engine": "single",
    }
    assert all(reason for _, _, reason in chosen)
    assert all(get_knob(resolved, key) == value for key, value, _ in chosen)
    assert resolve.resolve_autos(resolved, device="cpu", world=1) == (resolved, [])
    elsewhere = {key: value for key, value, _ in resolve.resolve_autos(config, device="gpu", world=8)[1]}
    assert elsewhere == {
        "task.kind": "language",
        "train.dtype": "bf16",
        "optim.decay_steps": 70,
        "optim.weight_decay": 0.1,
        "parallel.engine": "sharded",
    }
    none = load.build_config(tree(train={"steps": 0}, optim={"warmup_steps": 5}), "here")
    assert resolve.resolve_autos(none, device="cpu", world=1)[0].optim.decay_steps == "auto"  # the next start decides


def test_a_list_of_shares_is_one_of_all_ranks() -> None:
    config = load.build_config(tree(balance={"batch": [30, 2]}), "here")
    for world, there in ((3, "are 3"), (1, "is 1")):
        with pytest.raises(ConfigError, match=rf"has 2 numbers for ranks, but there {there}; give each"):
            resolve.resolve_autos(config, device="cpu", world=world)


def test_all_that_cannot_be_with_so_many_ranks_comes_at_once() -> None:
    lists = {"batch": [30, 2], "optimizer_state": [1, 2]}
    config = load.build_config(tree(balance=lists, parallel={"engine": "single"}), "here")
    with pytest.raises(ConfigError) as caught:
        resolve.resolve_autos(config, device="cpu", world=3)
    assert [line.split()[1] for line in str(caught.value).splitlines()[1:]] == [
        "parallel.engine",
        "balance.batch",
        "balance.optimizer_state",
    ]


@pytest.mark.parametrize(
    ("balance", "degree", "sentence"),
    [
        (
            {"optimizer_state": [1, 2, 3]},
            2,
            "balance.optimizer_state has 3 numbers, but parallel.shard_degree is 2",
        ),
        (
            {"batch": [30, 2], "optimizer_state": [1]},
            "auto",
            "balance.batch has numbers for 2 ranks and balance.optimizer_state for 1",
        ),
        ({"batch": [30, 1, 1]}, 2, "balance.batch has numbers for 3 ranks, which parallel.shard_degree 2 does not"),
    ],
)
def test_lists_that_fit_no_number_of_ranks_are_a_mistake_of_the_recipe(
    balance: dict[str, Any], degree: int | str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load.build_config(tree(balance=balance, parallel={"shard_degree": degree}, train={"micro_batch": 99}), "here")
    assert "has 2 problems" in str(caught.value)
    assert sentence in str(caught.value)


def test_one_rank_alone_is_not_asked_of_many() -> None:
    config = load.build_config(tree(parallel={"engine": "single"}), "here")
    with pytest.raises(
        ConfigError, match=r"parallel.engine single trains on one rank, but there are 2; set parallel.engine"
    ):
        resolve.resolve_autos(config, device="cpu", world=2)


def test_what_one_rank_does_not_read_is_told() -> None:
    asked = {"zero": 2, "grad_reduce": "per_step"}
    config = load.build_config(tree(parallel={"engine": "single", **asked}, optim={"double_buffer": True}), "here")
    assert [sentence.split()[0] for sentence in find_unused_keys(config)] == [
        "parallel.zero",
        "parallel.grad_reduce",
        "optim.double_buffer",
    ]
    assert find_unused_keys(config)[0] == (
        "parallel.zero has no effect with parallel.engine single, which shards nothing; remove it, or set "
        "parallel.engine=auto"
    )
    assert find_unused_keys(load.build_config(tree(parallel=asked), "here")) == []  # a recipe for many may run on one


def test_what_nothing_reads_is_told() -> None:
    asked = {"spike_factor": 3.0, "rollback_steps": 5, "wait_for_node_s": 9.0, "on_lost_node": [], "replicate_every": 4}
    told = find_unused_keys(load.build_config(tree(resilience=asked), "here"), several=False)
    keys = ("spike_factor", "rollback_steps", "wait_for_node_s", "replicate_every")
    assert [sentence.split()[0] for sentence in told] == [f"resilience.{key}" for key in keys]
    assert told[1] == (
        "resilience.rollback_steps has no effect with on_nan skip and on_spike off; set one of them to rollback, or "
        "remove resilience.rollback_steps"
    )
    fp8 = {"fp8_history": 4, "fp8_margin": 1}
    told = find_unused_keys(load.build_config(tree(train=fp8 | {"fp8": "block"}), "here"))
    assert told[1] == "train.fp8_margin has no effect with train.fp8 block; remove it, or set train.fp8=delayed"
    assert len(told) == 2 and not find_unused_keys(load.build_config(tree(train=fp8 | {"fp8": "delayed"}), "here"))
    moe: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "balance_weight": 0.1}
    for more, key in (
        ({"balance": "none"}, "balance_weight"),
        ({"dense_layers": [1]}, "dense_layers"),
        ({"balance": "sequence"}, None),
    ):
        model = SHAPE | {"architecture": "qwen3_moe", "moe": moe | more}
        told = find_unused_keys(load.build_config({"model": model}, "here"))
        assert [sentence.split()[0] for sentence in told] == ([f"model.moe.{key}"] if key else [])
    read = asked | {"on_spike": "rollback", "on_lost_node": ["wait"]}
    assert find_unused_keys(load.build_config(tree(resilience=read), "here"), several=True) == []


def test_going_on_keeps_what_auto_was_resolved_to() -> None:
    wanted = load.build_config(tree(), "here")
    saved = load.update_config(
        wanted,
        {"train.micro_batch": 4, "train.dtype": "fp64", "model.vocab_size": 300, "data.tokenizer": "train",
         "optim.decay_steps": 10, "train.compile": False, "parallel.engine": "single"},
    )  # fmt: skip
    going_on = resolve.continue_config(wanted, saved, FOLDER)
    assert going_on.parallel.engine == "auto"  # the layout is the cluster's business
    assert going_on == load.update_config(saved, {"parallel.engine": "auto"})


FREE = {
    "train.steps": 9,
    "train.micro_batch": 2,
    "train.compile": True,
    "train.deterministic": True,
    "train.eval_every": 3,
    "train.patience": 3,
    "train.eval_sequences": 3,
    "train.profile": "2-3",
    "train.memory_snapshot": 2,
    "data.cache": "/elsewhere",
    "data.workers": 2,
    "data.read_ahead": 2,
    "optim.double_buffer": True,
    "parallel.layout": "auto",
    "parallel.engine": "sharded",
    "parallel.zero": 2,
    "parallel.grad_reduce": "per_step",
    "parallel.shard_degree": 1,
    "parallel.tensor": 2,
    "parallel.sequence_parallel": False,
    "parallel.pipeline": 2,
    "parallel.schedule": "gpipe",
    "parallel.layers_per_stage": [1, 1],
    "parallel.context": 2,
    "parallel.context_by": "ring",
    "balance.context": [3, 1],
    "parallel.expert": 2,
    "balance.experts": [3, 1],
    "balance.batch": "even",
    "balance.optimizer_state": "even",
    "balance.hardware": "given.json",
    "memory.activations": "full",
    "memory.offload_prefetch_blocks": 5,
    "comm.timeout_s": 5.0,
    "resilience.hang_timeout_s": 7.0,
    "resilience.on_nan": "stop",
    "resilience.on_spike": "skip",
    "resilience.spike_factor": 7.0,
    "resilience.rollback_steps": 7,
    "resilience.checksum_every": 7,
    "checkpoint.every": 2,
    "checkpoint.best": True,
    "checkpoint.keep": 1,
    "resilience.max_restarts": 0,
    "resilience.in_memory_checkpoints": False,
    "resilience.replicate_every": "off",
    "resilience.max_identical_failures": 1,
    "resilience.on_lost_node": [],
    "train.epochs": 2.0,
    "train.stop_after": "3h",
    "train.stop_every": 500,
    "resilience.wait_for_node_s": 5.0,
    "resilience.rejoin_nodes": False,
    "resilience.heartbeat_timeout_s": 3.0,
    "resilience.storage_timeout_s": 7.0,
    "resilience.health": "off",
    "resilience.stop_notice_s": 120.0,
    "resilience.preemption_notice": "off",
    "resilience.metadata_url": "http://127.0.0.1:1338",
    "storage.private": True,
    "report.wandb": "a-project",
    "report.prometheus": 9420,
    "report.webhook": "hook",
    "callback.code": "callback.py",
    "callback.options": {"a": 1},
    "report.tensorboard": False,
    "slurm.partition": ["gpu"],
    "slurm.account": "lab",
    "slurm.qos": "high",
    "slurm.time": "2:00:00",
    "slurm.lead_s": 60,
    "slurm.gpus_per_node": 8,
    "slurm.cpus_per_task": 12,
    "slurm.exclusive": False,
    "slurm.exclude": "n7",
    "slurm.modules": ["cuda"],
    "slurm.setup": ["source env.sh"],
    "slurm.python": "/env/bin/python",
    "slurm.container": "image.sif",
    "slurm.container_by": "pyxis",
    "slurm.mounts": ["/data"],
    "slurm.extra": ["--constraint=a100"],
    "k8s.image": "image",
    "k8s.namespace": "lab",
    "k8s.volumes": ["runs:/runs"],
    "k8s.partition": ["a100"],
    "k8s.pool_label": "pool",
    "k8s.gpus_per_node": 8,
    "k8s.gpu_resource": "amd.com/gpu",
    "k8s.cpus": 12,
    "k8s.memory": "64Gi",
    "k8s.shared_memory_gib": 8,
    "k8s.queue": "team",
    "k8s.time": "2:00:00",
    "k8s.python": "python",
}


def test_every_key_is_either_free_or_part_of_the_trajectory() -> None:
    free = {key for key, info in iter_knobs() if not info.json_schema_extra["trajectory"]}
    assert free == set(FREE)


BESIDE: dict[str, dict[str, Any]] = {  # keys that mean nothing alone
    "parallel.schedule": {"parallel.pipeline": 2},
    "parallel.layers_per_stage": {"parallel.pipeline": 2},
    "parallel.context_by": {"parallel.context": 2},
    "balance.context": {"parallel.context": 2},
    "balance.experts": {"parallel.expert": 2},
    "callback.options": {"callback.code": "callback.py"},
}


@pytest.mark.parametrize("key", sorted(FREE))
def test_what_does_not_shape_the_curve_may_change(key: str) -> None:
    saved = load.build_config(tree(train={"steps": 5, "micro_batch": 1, "compile": False}), "here")
    mixtral = {"model.architecture": "mixtral", "model.moe.experts": 4, "model.moe.experts_per_token": 2}
    saved = load.update_config(saved, {"model.layers": 2} | (mixtral if "expert" in key else {}))
    wanted = load.update_config(saved, {key: FREE[key]} | BESIDE.get(key, {}))
    going_on = resolve.continue_config(wanted, saved, FOLDER)
    assert get_knob(going_on, key) == FREE[key] != get_knob(saved, key)


@pytest.mark.parametrize(
    ("then", "now", "kept"),
    [
        ({}, {}, True),
        ({"pipeline": 2}, {"pipeline": 2, "zero": 1}, True),
        ({"tensor": 2}, {}, False),
        ({"tensor": 2}, {"pipeline": 2}, False),
        ({"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}, False),
    ],
)
def test_what_fitted_a_rank_is_looked_for_anew_when_it_holds_another_part(
    then: dict[str, Any], now: dict[str, Any], kept: bool
) -> None:
    model = {"hidden": 16, "layers": 4, "heads": 2, "intermediate": 32}
    asked = tree(train={"steps": 5}, model=model, memory={"activations": "auto"})
    found = {"train.micro_batch": 2, "memory.activations": "full"}
    saved = load.update_config(load.build_config(asked | {"parallel": then}, "then"), found)
    going_on = resolve.continue_config(load.build_config(asked | {"parallel": now}, "now"), saved, FOLDER)
    assert [get_knob(going_on, key) for key in found] == ([2, "full"] if kept else ["auto", "auto"])


def test_a_number_of_processes_may_be_left_to_the_machine_again() -> None:
    wanted = load.build_config(tree(data={"workers": "auto"}), "here")
    saved = load.update_config(wanted, {"data.workers": 7})
    assert resolve.continue_config(wanted, saved, FOLDER).data.workers == "auto"


def test_work_that_was_divided_by_hand_may_be_left_to_measuring_again() -> None:
    for was in ("even", "measured-once", [3, 5]):
        saved = load.build_config(tree(train={"steps": 5, "global_batch": 8}, balance={"batch": was}), "here")
        wanted = load.update_config(saved, {"balance.batch": "auto"})
        assert resolve.continue_config(wanted, saved, FOLDER).balance.batch == "auto"


@pytest.mark.parametrize(
    ("degree", "key", "by"),
    [
        ("expert", "balance.experts", [3, 1]),
        ("pipeline", "parallel.layers_per_stage", [3, 1]),
        ("context", "parallel.context_by", "ring"),
    ],
)
def test_what_was_divided_by_hand_may_be_on_one_rank_again(degree: str, key: str, by: object) -> None:
    model = {"architecture": "mixtral", "layers": 4, "moe": {"experts": 4, "experts_per_token": 2, "balance": "none"}}
    asked = tree(train={"steps": 5})
    asked["model"] |= model
    wanted = load.build_config(asked, "here")
    saved = load.update_config(wanted, {f"parallel.{degree}": 2, key: by})
    assert get_knob(resolve.continue_config(wanted, saved, FOLDER), key) == "auto"


@pytest.mark.parametrize(
    ("wanted", "saved", "named"),
    [
        ({"optim": {"lr": 1e-3}}, {}, r"optim.lr is 0.001 now and was 0.0003\. Restore"),
        ({"train": {"seed": 1}, "data": {"seq_len": 8}}, {}, r"data.seq_len is 8 now and was 512; train.seed is 1 now"),
        ({"model": SHAPE | {"dropout": 0.1}}, {}, r"model.dropout is 0.1 now and was 0.0"),
        ({"model": SHAPE | {"rope_scaling": {}}}, {}, r"model.rope_scaling.factor is 8.0 now and was None"),
        ({}, {"model": SHAPE | {"rope_scaling": {}}}, r"model.rope_scaling.factor is None now and was 8.0"),
        # A shape that the recipe once replaced and now takes from the preset again is another model.
        (
            {"model": {"preset": "llama-3-8b"}},
            {"model": {"preset": "llama-3-8b", "layers": 2}},
            r"model.layers is None",
        ),
        ({}, {"model": SHAPE | {"intermediate": 99}}, r"model.intermediate is None now and was 99"),
    ],
)
def test_another_configuration_is_refused_with_its_keys(
    wanted: dict[str, Any], saved: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        resolve.continue_config(load.build_config(tree() | wanted, "a"), load.build_config(tree() | saved, "b"), FOLDER)
    assert "the run folder runs/demo has a run of another configuration" in str(caught.value)
    assert str(caught.value).endswith("Restore these values to resume it, or choose another --run-dir")


def test_nothing_but_the_recipe_is_needed_to_read_one() -> None:
    for path in sorted(Path("recipes").glob("*.yaml")):
        config = load.load_recipe(path)
        assert load.build_config(load.parse_yaml(load.to_yaml(config), "again"), "again") == config
        assert math.isfinite(config.optim.lr)


def test_wrong_types_do_not_hide_impossible_combinations() -> None:
    given = tree(train={"steps": "many", "global_batch": 4, "micro_batch": 8}, optim={"lrr": 1})
    with pytest.raises(ConfigError) as caught:
        load.build_config(given, "here")
    text = str(caught.value)
    assert "has 3 problems" in text
    assert "train.steps must be a whole number" in text
    assert "unknown key optim.lrr" in text
    assert "train.micro_batch 8 is larger than train.global_batch 4" in text


def test_a_key_that_is_wrong_itself_is_in_no_combination() -> None:
    given = tree(train={"global_batch": "x", "micro_batch": 4000})
    with pytest.raises(ConfigError) as caught:
        load.build_config(given, "here")
    assert str(caught.value).count("global_batch") == 1


def test_a_misspelt_key_is_named_once() -> None:
    assert (
        refusal("model: {hiden: 64, layers: 2, heads: 4}")
        == "r.yaml: unknown key model.hiden; did you mean model.hidden?"
    )


@pytest.mark.parametrize("few", [[1e-9], [0.9 / 4095], [3.3e-5, 1e-6], [0.0002] * 9])
def test_the_weights_that_are_advised_are_enough(few: list[float]) -> None:
    def mixture(few: list[float]) -> dict[str, Any]:
        sources = [{"path": f"source {number}", "weight": weight} for number, weight in enumerate([1.0, *few])]
        return tree(data={"source": sources})

    with pytest.raises(ConfigError) as caught:
        load.build_config(mixture(few), "here")
    advised = [float(part.split()[0]) for part in str(caught.value).split("raise it to ")[1:]]
    assert len(advised) == len(few)
    load.build_config(mixture(advised), "here")
    with pytest.raises(ConfigError):
        load.build_config(mixture([weight * 0.98 for weight in advised]), "here")


def test_a_saved_configuration_that_was_cut_is_damaged_wherever_that_was(tmp_path: Path) -> None:
    """And not one with other values, though the rest of it may be good YAML; releases before did not mark its end."""
    tree = {"model": {"hidden": 16, "layers": 1, "heads": 2}, "train": {"steps": 1234}}
    file, config = tmp_path / "config.yaml", load.build_config(tree, "here")
    text = load.render_saved_recipe(config)
    file.write_text(text)
    assert load.load_saved_recipe(file) == config == load.load_recipe(file)
    for cut in (*range(0, len(text), 61), text.index("1234") + 2, len(text) - 1):
        file.write_text(text[:cut])
        with pytest.raises(ConfigError, match=r"config.yaml, the run's configuration, is damaged"):
            load.load_saved_recipe(file)
    file.write_text(text.replace("steps: 1234", "steps: 12\0"))
    with pytest.raises(ConfigError, match=r"is damaged .*restore it from a copy, or choose another --run-dir"):
        load.load_saved_recipe(file)
    file.write_text(load.to_yaml(config))
    assert load.load_saved_recipe(file) == config


def published(path: Path) -> str:
    """The preset of the model that a recipe goes on from, such as qwen3-8b of Qwen/Qwen3-8B, if it is a known one."""
    named = str(load.load_recipe(path).model.from_hf).rpartition("/")[2].lower()
    return re.sub("-(instruct|base)", "", named)


TUNED = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if published(path) in PRESETS]


def test_each_family_has_a_recipe_of_each_kind() -> None:
    assert len(TUNED) == 6
    families = {path.stem.split("-")[0] for path in TUNED}
    assert families == {"llama", "qwen3", "mistral"}
    for family in families:
        of_it = [load.load_recipe(path) for path in (ROOT / "recipes").glob(f"{family}*.yaml")]
        assert any(each.model.preset for each in of_it)
        tuned = [each for each in of_it if each.data.format == "chat"]
        assert {each.model.lora is None for each in tuned} == {True, False}


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.stem)
def test_a_tuning_recipe_fits_the_published_model_and_says_how_to_fetch_it(path: Path) -> None:
    wanted = load.load_recipe(path)
    assert build_model_spec(wanted, PRESETS[published(path)]).max_seq_len >= wanted.data.seq_len
    name = wanted.model.from_hf
    assert f"hf download {name} --local-dir {name}\n" in path.read_text(encoding="utf-8")
