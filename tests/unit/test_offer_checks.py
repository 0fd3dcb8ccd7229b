"""What a leader may offer to a node that was started with a recipe of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import load, resolve
from phalanx.config.schema import Config, iter_knobs
from phalanx.core import faults
from phalanx.core.errors import ConfigError
from phalanx.core.run_paths import RunPaths
from phalanx.launch import measure_devices, prepare

WANTED = {
    "model": {"hidden": 16, "layers": 1, "heads": 2, "code": "own.py"},
    "data": {"source": ["a.txt"], "cache": "/cache"},
    "optim": {"double_buffer": True},
}


def config(**more: Any) -> Config:
    return load.update_config(
        load.build_config(WANTED, "here"), {key.replace("__", "."): value for key, value in more.items()}
    )


def changed(before: Config, change: dict[str, Any]) -> Config:
    """As an attacker would: whether its keys fit together does not matter."""
    tree = before.model_dump(mode="json")
    for key, value in change.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place[section] = place[section] or {}
            place = place[section]
        place[leaf] = value
    return Config.model_validate(tree)


@pytest.mark.parametrize(
    "change",
    [
        {"model.code": "/tmp/theirs.py"}, {"model.code": None}, {"task.code": "theirs.py"},
        {"model.from_hf": "/tmp/hf"}, {"task.options": {"file": "/etc/passwd"}}, {"slurm.setup": ["theirs"]},
        {"data.source": ["a.txt", "/etc/passwd"]}, {"data.validation": {"mine": ["/etc/passwd"]}},
        {"data.chat_template": "theirs.jinja", "data.format": "chat"}, {"data.tokenizer": "/tmp/tokenizer"},
        {"data.cache": "s3://theirs/cache"}, {"balance.hardware": "theirs.json"}, {"report.wandb": "theirs"},
        {"report.webhook": "theirs"}, {"report.prometheus": "0.0.0.0:80"},
        {"model.lora": {"adapter": "/tmp/theirs"}}, {"parallel.tensor": 2}, {"train.steps": 7},
        {"resilience.max_restarts": 99}, {"optim.name": "sgd"},
    ],
)  # fmt: skip
def test_another_recipe_is_refused(change: dict[str, Any]) -> None:
    """Whatever it would import or open, and what it would compute."""
    wanted, offered = config(), changed(config(), change)
    with pytest.raises(ConfigError, match="recipe differs from this node's: ") as caught:
        prepare.check_offer(wanted, offered)
    assert next(iter(change)).split(".")[1] in str(caught.value)
    assert str(caught.value).endswith("start all nodes with the same recipe and the same keys")
    prepare.check_offer(offered, offered)


def test_what_a_leader_has_resolved_is_taken() -> None:
    wanted = config()
    resolved, _ = resolve.resolve_autos(wanted, device="cpu", world=2)
    found = {"train.micro_batch": 3, "model.vocab_size": 999, "data.tokenizer": "train", "optim.double_buffer": False}
    prepare.check_offer(wanted, load.update_config(resolved, found))
    hf = changed(wanted, {"model.from_hf": "/hf"})
    prepare.check_offer(hf, changed(hf, {"data.tokenizer": "/hf"}))
    with pytest.raises(ConfigError, match=r"data.tokenizer is '/tmp/hf' there and 'auto' here"):
        prepare.check_offer(hf, changed(hf, {"data.tokenizer": "/tmp/hf"}))


def test_no_auto_comes_to_a_file_that_the_leader_names() -> None:
    """Of whatever key: wherever a recipe can say auto and a path as well."""
    tried = []
    for key, _ in iter_knobs():
        try:
            wanted, offered = (changed(config(), {key: value}) for value in ("auto", "/tmp/theirs"))
        except (ConfigError, ValueError):  # one of the two is none of its values
            continue
        tried.append(key)
        with pytest.raises(ConfigError, match=f"{key} is .*/tmp/theirs'.* there"):
            prepare.check_offer(wanted, offered)
    assert {"data.tokenizer", "slurm.python", "model.code"} <= set(tried)


def test_a_planned_layout_is_taken_where_the_recipe_leaves_it_open() -> None:
    wanted = config(parallel__layout="auto", train__micro_batch=2, balance__hardware="known.json")
    laid = {"parallel.layout": "given", "parallel.tensor": 2, "parallel.engine": "sharded", "balance.hardware": None}
    prepare.check_offer(wanted, changed(wanted, laid))
    for change in ({"train.micro_batch": 4}, {"balance.hardware": "theirs.json"}, {"model.code": "theirs.py"}):
        with pytest.raises(ConfigError, match="recipe differs"):
            prepare.check_offer(wanted, changed(wanted, laid | change))
    with pytest.raises(ConfigError, match=r"parallel.layout is 'auto' there and 'given' here"):
        prepare.check_offer(config(), config(parallel__layout="auto"))


def test_a_url_is_told_without_what_is_secret_in_it() -> None:
    with pytest.raises(ConfigError, match=r"data.cache is 's3://") as caught:
        prepare.check_offer(config(), config(data__cache="s3://me:hidden@bucket/x?token=hidden"))
    assert "hidden@" not in str(caught.value) and "token" not in str(caught.value)


def test_faults_are_those_that_this_node_was_asked_for() -> None:
    asked = faults.parse_faults(["kill:rank=1,step=7", "nan:step=3,attempt=2"])
    prepare.check_faults(asked, faults.shift_attempts(asked, 1))
    prepare.check_faults(asked, faults.faults_from_message(faults.faults_to_message(faults.shift_attempts(asked, 5))))
    prepare.check_faults([], [])
    for other in ([], asked[:1], [*asked, asked[0]], [asked[0], replace(asked[1], attempt=9)], [asked[1], asked[0]]):
        with pytest.raises(ConfigError, match="faults differ from this node's --inject"):
            prepare.check_faults(asked, other)


def test_nodes_that_measure_take_no_other_recipe_either() -> None:
    works = measure_devices._measuring_callbacks(config(), {}, [], RunPaths(Path("unused")), as_json=True)
    with pytest.raises(ConfigError, match=r"recipe differs from this node's: model.code is"):
        works.make_job(
            {"config": load.to_yaml(changed(config(), {"model.code": "theirs.py"})), "world": 2}, lambda: None
        )


def test_every_recipe_that_comes_with_phalanx_takes_what_it_is_resolved_to() -> None:
    for path in sorted(Path(__file__).resolve().parents[2].joinpath("recipes").glob("*.yaml")):
        wanted = load.load_recipe(path)
        if wanted.parallel.tensor * wanted.parallel.pipeline == 1:
            world = wanted.parallel.context * wanted.parallel.expert
            prepare.check_offer(wanted, resolve.resolve_autos(wanted, device="cpu", world=world)[0])
