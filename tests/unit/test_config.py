"""The knobs: each documented, each with a default that stands, and combinations that numbers alone rule out."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from phalanx.config.model_spec import build_model_spec
from phalanx.config.schema import Config, get_knob, iter_knobs
from phalanx.config.validation import find_problems
from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec, RopeScaling
from phalanx.models.families.catalog import PRESETS, default_intermediate
from phalanx.models.hf_config import config_from_spec, spec_from_config

SHAPE = {"hidden": 16, "layers": 1, "heads": 2}


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": SHAPE} | sections)


def test_every_knob_says_what_it_does_and_whether_it_shapes_the_curve() -> None:
    for key, info in iter_knobs():
        assert info.description and info.description[0] != " ", key
        assert info.description[-1] != ".", key
        assert isinstance(info.json_schema_extra["trajectory"], bool), key
        assert not info.is_required(), key


def test_keys_are_unique_and_can_be_read() -> None:
    keys = [key for key, _ in iter_knobs()]
    assert len(set(keys)) == len(keys) > 50
    bare = Config()
    assert get_knob(bare, "train.steps") == 1000
    assert get_knob(bare, "model.rope_scaling.factor") is None
    stretched = config(model=SHAPE | {"rope_scaling": {"factor": 3}})
    assert get_knob(stretched, "model.rope_scaling.factor") == 3.0
    for key in keys:
        get_knob(bare, key)
        get_knob(stretched, key)


def test_a_configuration_is_inert() -> None:
    made = config()
    with pytest.raises(ValueError, match="frozen"):
        made.train.steps = 5
    assert find_problems(made) == []


def test_the_defaults_are_legal_values_of_their_own_knobs() -> None:
    tree = json.loads(Config().model_dump_json())
    assert Config.model_validate(tree) == Config()


def test_shapes_come_from_the_recipe_alone() -> None:
    made = build_model_spec(config(model=SHAPE | {"vocab_size": 300, "heads": 4, "kv_heads": 2}))
    assert made == ModelSpec(
        vocab_size=300, hidden=16, layers=1, heads=4, kv_heads=2, head_dim=4, intermediate=64, max_seq_len=512
    )
    assert default_intermediate(4096) == 10944  # 8/3 of 4096, up to a multiple of 64


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_every_shape_and_the_recipe_replaces_some(name: str) -> None:
    assert find_problems(config(model={"preset": name})) == []
    assert build_model_spec(config(model={"preset": name})) == PRESETS[name]
    changed = build_model_spec(config(model={"preset": name, "layers": 4, "dropout": 0.1, "vocab_size": 512}))
    assert (changed.layers, changed.dropout, changed.vocab_size) == (4, 0.1, 512)
    assert changed.hidden == PRESETS[name].hidden


def test_a_folder_gives_every_shape() -> None:
    theirs = PRESETS["llama-3.2-1b"]
    made = Config.model_validate({"model": {"from_hf": "somewhere"}})
    assert find_problems(made) == []  # the folder is not looked at here
    assert build_model_spec(made, theirs) == theirs
    long = Config.model_validate({"model": {"from_hf": "somewhere"}, "data": {"seq_len": 2**18}})
    with pytest.raises(ConfigError, match=r"data.seq_len 262144 is longer than the model's 131072 positions"):
        build_model_spec(long, theirs)


def test_positions_of_a_folders_model_may_be_stretched() -> None:
    """As an export writes it, and transformers reads it; what has a table of positions cannot be."""
    original = config_from_spec(PRESETS["llama-3-8b"], torch.bfloat16)
    stretched = {"rule": "yarn", "factor": 16, "original_max_seq_len": 8192}
    asked = {"model": {"from_hf": "somewhere", "max_seq_len": 131072, "rope_scaling": stretched}}
    made = Config.model_validate(asked | {"data": {"seq_len": 131072}})
    assert find_problems(made) == []
    spec = build_model_spec(made, spec_from_config(original, "folder"))
    rule = RopeScaling(rule="yarn", factor=16.0, original_max_seq_len=8192)
    assert spec == replace(PRESETS["llama-3-8b"], max_seq_len=131072, rope_scaling=rule)
    # Beside the rule that key would be the one that counts.
    written = config_from_spec(spec, torch.bfloat16, original | {"original_max_position_embeddings": 4096})
    assert written["max_position_embeddings"] == 131072
    assert written["rope_scaling"]["rope_type"] == "yarn"
    assert spec_from_config(written, "exported") == spec
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden": 16,
        "layers": 1,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 64,
    }
    learned = ModelSpec(**sizes, max_seq_len=32, architecture="gpt2")
    for given in ({"max_seq_len": 64}, {"rope_theta": 5e5}):
        other = Config.model_validate({"model": {"from_hf": "somewhere"} | given, "data": {"seq_len": 32}})
        with pytest.raises(ConfigError, match=r"model.\w+ cannot be combined with model.from_hf of a model whose pos"):
            build_model_spec(other, learned)


def test_what_a_recipe_cannot_say_of_a_rotary_rule_stays() -> None:
    asked = {"model": {"from_hf": "x", "rope_scaling": {"rule": "yarn", "factor": 8, "original_max_seq_len": 4096}}}
    sharper = RopeScaling(rule="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.7, truncate=False, beta_fast=20.0)
    folder = replace(PRESETS["moonlight-16b-a3b"], rope_scaling=sharper)
    wanted = replace(sharper, factor=8.0, original_max_seq_len=4096, beta_fast=32.0)
    assert build_model_spec(Config.model_validate(asked), folder).rope_scaling == wanted
    other = replace(sharper, rule="linear")
    assert build_model_spec(Config.model_validate(asked), replace(folder, rope_scaling=other)).rope_scaling == replace(
        wanted, mscale=None, mscale_all_dim=None, truncate=True
    )


@pytest.mark.parametrize(
    ("preset", "given", "words"),
    [
        ("gpt-j-6b", {"rope_theta": 5e5}, "rope_theta is 500000, which GPT-J does not support, so it could not be"),
        ("falcon-rw-1b", {"rope_theta": 5e5}, "rope_theta has no effect: a Falcon-RW has no rotary positions"),
        ("phi-3-mini-4k", {"max_seq_len": 8192}, "cannot be combined with model.from_hf of a model by LongRoPE"),
    ],
)
def test_rotary_keys_that_would_be_lost_are_refused(preset: str, given: dict[str, Any], words: str) -> None:
    """In training, or in the config.json of an export."""
    pairs = tuple([1.0] * (PRESETS[preset].head_dim // 2))
    long = RopeScaling(rule="longrope", factor=1.0, short_factors=pairs, long_factors=pairs, original_max_seq_len=2048)
    folder = replace(PRESETS[preset], rope_scaling=long if "LongRoPE" in words else None)
    asked = Config.model_validate({"model": {"from_hf": "somewhere"} | given, "data": {"seq_len": 32}})
    with pytest.raises(ConfigError, match=words):
        build_model_spec(asked, folder)
    assert build_model_spec(Config.model_validate({"model": {"from_hf": "somewhere"}}), folder) == folder


def test_a_vocabulary_that_is_not_yet_known_is_no_problem_and_none_at_all_is() -> None:
    assert find_problems(config()) == []
    with pytest.raises(ConfigError, match=r"model.vocab_size is 0"):
        build_model_spec(config())
    with pytest.raises(ConfigError, match=r"model.preset 'llama' is not known; did you mean llama-"):
        build_model_spec(config(model={"preset": "llama"}))


def test_an_unknown_preset_without_a_neighbour_says_what_lists_them_all() -> None:
    (found,) = find_problems(config(model={"preset": "t5"}))
    assert found == "model.preset 't5' is not known; see `phalanx config presets`"
