"""What `phalanx config explain` says of keys."""

import pytest

from phalanx.config.explain import describe_default, explain_key
from phalanx.config.schema import iter_knobs
from phalanx.core.errors import ConfigError


def test_a_key_is_explained_with_all_that_is_known_of_it() -> None:
    assert explain_key("optim.lr", 80).splitlines() == [
        "optim.lr: peak learning rate",
        "  values   number above 0",
        "  default  0.0003",
        "  curve    yes: it defines the loss curve; a run folder keeps it",
    ]
    zero = explain_key("parallel.zero", 80)
    assert "  values   auto, 1, 2, 3\n" in zero
    assert "  default  auto\n" in zero
    assert "  auto     resolved at each start;" in zero
    assert zero.endswith("  curve    no: it may differ from one start to the next")
    assert max(map(len, zero.splitlines())) <= 80
    assert "first start and kept unless the run resumes on other" in explain_key("train.micro_batch", 120)
    assert "first start and kept;" in explain_key("optim.decay_steps", 120)
    assert "stays auto" in explain_key("balance.batch", 120)


@pytest.mark.parametrize("key", [key for key, _ in iter_knobs()])
def test_every_key_can_be_explained(key: str) -> None:
    assert explain_key(key, 60).startswith(f"{key}: ")


def test_a_section_and_all_keys_are_listed_with_a_line_each() -> None:
    assert [line.split()[:2] for line in explain_key("checkpoint", 300).splitlines()] == [
        ["checkpoint.every", "100"],
        ["checkpoint.keep", "3"],
        ["checkpoint.best", "false"],
    ]
    lines = explain_key("", 80).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [key for key, _ in iter_knobs()]
    assert max(map(len, lines)) <= 80
    assert explain_key("model.lora", 300).count("\n") == explain_key("", 300).count("\nmodel.lora.") - 1


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_nothing_of_what_keys_mean_is_cut(width: int) -> None:
    text = " ".join(explain_key("", width).split())
    for key, info in iter_knobs():
        assert f"{key} {describe_default(info)} {' '.join(info.description.split())}" in text


def test_a_key_that_there_is_not_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key optim.lrr; did you mean optim.lr\?$"):
        explain_key("optim.lrr", 80)
    with pytest.raises(ConfigError, match=r"^unknown key xyzzy; the sections are model, task, data"):
        explain_key("xyzzy", 80)
