"""The nine keys: defaults, kinds of values, what goes together, and what a user is told."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.compat.sagemaker import config
from phalanx.core.errors import ConfigError


def refused(given: dict[str, Any], world: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        config.check_settings(given, world)
    return str(caught.value)


def test_nothing_given_is_the_documented_defaults() -> None:
    settings = config.check_settings({}, 8)
    assert dict(settings.values) == {
        "hybrid_shard_degree": 0,
        "sm_activation_offloading": True,
        "activation_loading_horizon": 2,
        "fsdp_cache_flush_warnings": True,
        "allow_empty_shards": False,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "random_seed": 12345,
    }
    assert settings.given == frozenset()
    assert settings.notes == ()


@pytest.mark.parametrize("shard", range(9))
def test_any_divisor_shards_and_no_other_number(shard: int) -> None:
    if shard == 0 or 8 % shard == 0:
        assert config.check_settings({"hybrid_shard_degree": shard}, 8)["hybrid_shard_degree"] == shard
    else:
        assert "does not divide the 8 ranks" in refused({"hybrid_shard_degree": shard})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hybrid_shard_degree": 9}, "hybrid_shard_degree is 9; for 8 ranks give 0 to 8"),
        ({"hybrid_shard_degree": -1}, "give 0 to 8"),
        ({"activation_loading_horizon": 0}, "activation_loading_horizon is 0; give a number above 0"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree is 0; for 8 ranks give 1 to 8"),
        ({"tensor_parallel_degree": 3}, "tensor_parallel_degree is 3, which does not divide the 8 ranks"),
        ({"tensor_parallel_degree": 2, "hybrid_shard_degree": 8}, "8 x tensor_parallel_degree 2"),
        ({"tensor_parallel_degree": 2, "expert_parallel_degree": 2}, "cannot be combined"),
        ({"context_parallel_degree": 2, "expert_parallel_degree": 2}, "cannot be combined"),
        ({"expert_parallel_degree": 2, "hybrid_shard_degree": 8}, "x expert_parallel_degree 2 does not divide"),
        ({"context_parallel_degree": 4, "tensor_parallel_degree": 4}, "4 x context_parallel_degree 4 does not divide"),
        ({"context_parallel_degree": 4, "hybrid_shard_degree": 2}, "is above hybrid_shard_degree 2"),
        ({"hybrid_shard_degree": True}, "hybrid_shard_degree is True; give an integer"),
        ({"hybrid_shard_degree": "2"}, "write it without quotes"),
        ({"hybrid_shard_degree": 2.0}, "is 2.0; give an integer"),
        ({"sm_activation_offloading": 1}, "is 1; give true or false"),
        ({"sm_activation_offloading": "True"}, "write it without quotes"),
        ({"hybrid_shard_degre": 2}, "did you mean hybrid_shard_degree?"),
        ({"shards": 2}, "known keys: hybrid_shard_degree"),
        ({"tensor_parallel_seed": 1, "random_seed": 1}, "both are given"),
    ],
)
def test_what_cannot_be_is_one_clear_sentence(given: dict[str, Any], says: str) -> None:
    assert says in refused(given)


def test_all_problems_are_told_at_once() -> None:
    told = refused({"tensor_parallel_degree": 16, "activation_loading_horizon": -1, "nonsense": 1, "random_seed": "x"})
    assert told.count("\n") == 4
    for part in ("tensor_parallel_degree is 16", "activation_loading_horizon is -1", "nonsense", "random_seed is 'x'"):
        assert part in told


def test_a_value_of_another_kind_is_not_judged_by_its_default_too() -> None:
    assert "\n" not in refused({"tensor_parallel_degree": "3"})


def test_the_old_name_of_the_seed_is_taken_with_a_note() -> None:
    settings = config.check_settings({"tensor_parallel_degree": 8, "tensor_parallel_seed": 0}, 8)
    assert settings["random_seed"] == 0
    assert "random_seed" in settings.given
    assert settings.notes == ("tensor_parallel_seed is the old name of random_seed, which has its value now",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n "sm_activation_offloading": True\n}', "f.json, line 2: True is Python syntax; in JSON write true"),
        ('{"allow_empty_shards": False}', "in JSON write false"),
        ('{"random_seed": None}', "in JSON write null"),
        ("{'random_seed': 1}", "needs double quotes"),
        ('{"random_seed": 1,}', "this is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"random_seed": 1, "random_seed": 2}', "f.json has random_seed twice; remove one"),
    ],
)
def test_a_file_that_is_not_json_is_told_by_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.read_config(file)
    assert says in str(caught.value)


def test_a_mapping_a_path_and_nothing_are_read(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{"hybrid_shard_degree": 2}')
    for given in (str(file), file, {"hybrid_shard_degree": 2}):
        assert config.read_config(given) == {"hybrid_shard_degree": 2}
    assert config.read_config(None) == {}
    with pytest.raises(ConfigError, match="cannot read"):
        config.read_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="not list"):
        config.read_config([])  # type: ignore[arg-type]


def test_the_launchers_parameters_win_and_say_so() -> None:
    both, notes = config.merge_settings({"hybrid_shard_degree": 2, "random_seed": 1}, {"hybrid_shard_degree": 4})
    assert both == {"hybrid_shard_degree": 4, "random_seed": 1}
    assert len(notes) == 1
    assert "hybrid_shard_degree is 4" in notes[0]
    assert config.merge_settings({"random_seed": 1}, {"tensor_parallel_seed": 1}) == ({"random_seed": 1}, [])
