"""Recipes that are refused, and in which words."""

from pathlib import Path

import pytest

from phalanx.config import load, resolve
from phalanx.core.errors import ConfigError
from tests.unit.test_recipe import GOOD, refusal

MALFORMED = [
    # not YAML, with the line
    (GOOD + "train: [", "r.yaml, line 2: not valid YAML"),
    (GOOD + "\ttrain: 1", "line 2"),
    (GOOD + "a: b: c", "line 2: not valid YAML (mapping values are not allowed here)"),
    (GOOD + "train: {steps: 3", "line 2"),
    (GOOD + "a: 'open", "r.yaml"),
    (GOOD + "a: *nowhere", "line 2: not valid YAML (found undefined alias 'nowhere')"),
    (GOOD + "---\na: 1", "line 2: not valid YAML (but found another document)"),
    (GOOD + "a: \x07", "line 2: the character '\\x07' is not text; remove it"),
    ("%YAML 9.9\n---\na: 1", "line 1"),
    ("[" * 3000, "nested too deeply"),
    ("{a: " * 3000, "nested too deeply"),
    ("- 1\n- 2", "a recipe is a mapping of sections such as `train:`, but this is a list"),
    ("5", "this is a number"),
    ("just words", "this is text"),
    ("true", "this is true or false"),
    # tags that a hostile or careless file may hold
    ("!!python/object/apply:os.system ['true']", "line 1: not valid YAML (could not determine a constructor"),
    ("train: !!python/name:os.system", "line 1"),
    ("train: !!python/object:os.system {}", "line 1"),
    ("train: !mine 3", "line 1"),
    ("train: {steps: !!int x}", "line 1: not valid YAML ('x' cannot be read as a YAML int)"),
    ("train: {steps: !!int ''}", "line 1: not valid YAML ('' cannot be read as a YAML int)"),
    ("optim: {lr: !!float ''}", "cannot be read as a YAML float"),
    ("report: {tensorboard: !!bool perhaps}", "cannot be read as a YAML bool"),
    ("a: !!timestamp soon", "cannot be read as a YAML timestamp"),
    ("a: 2001-99-99", "cannot be read as a YAML timestamp"),
    ("a: !!binary é", "line 1"),
    (f"train: {{steps: {'9' * 5000}}}", "cannot be read as a YAML int"),
    # keys
    (GOOD + "model: {}", "line 2: not valid YAML (the key 'model' appears twice)"),
    (GOOD + "train: {steps: 1, steps: 2}", "line 2: not valid YAML (the key 'steps' appears twice)"),
    ("? [1]\n: 2", "unhashable key"),
    ("? {a: 1}\n: 2", "unhashable key"),
    ("1: 2", "the key 1 must be a name"),
    ("1.5: 2", "the key 1.5 must be a name"),
    ("null: 2", "the key None must be a name"),
    ("true: 2", "the key True must be a name"),
    ("2001-01-01: 2", "must be a name"),
    ("train: {1: 2}", "the key 1 must be a name"),
    ('"\\ud800": 1', "must be a name"),
    ("'': 1", "unknown key ''"),
    ("'a(b': 1", "unknown key a(b"),
    ("'a[0]': 1", "unknown key a[0]"),
    ("int: 1", "unknown key int; the sections are model, task, data, train"),
    ("train: {int: 1}", "unknown key train.int; the keys of train are steps, epochs, glob"),
    ("train: {'literal[''auto'']': 1}", "unknown key train.literal"),
    ("trian: {steps: 1}", "unknown key trian; did you mean train?"),
    ("Train: {steps: 1}", "unknown key Train; did you mean train?"),
    ("train: {step: 1}", "unknown key train.step; did you mean train.steps?"),
    ("train: {lr: 1}", "unknown key train.lr; did you mean optim.lr?"),
    ("steps: 1", "unknown key steps; did you mean train.steps?"),
    ("train.steps: 1", "unknown key train.steps; write steps below train:"),
    ("model: {rope_scaling: {factr: 2}}", "unknown key model.rope_scaling.factr; did you mean model.rope_scaling"),
    ("модель: {}", "unknown key модель"),
    ('"a\\nb": 1', "unknown key 'a\\nb'"),
    ("train: {🙂: 1}", "unknown key train.🙂"),
    # sections
    ("train:", "train is a section, not empty; give it keys or remove it"),
    ("train: []", "train is a section, not a list"),
    ("train: 5", "train is a section, not a number"),
    ("train: fast", "train is a section, not text"),
    ("train: !!set {a, b}", "train is a section"),
    ("train: !!omap [a: 1]", "train is a section"),
    ("train: &x {train: *x}", "unknown key train.train"),
    ("model: {rope_scaling: 5}", "model.rope_scaling is a section, not a number"),
    ("model: {rope_scaling: []}", "model.rope_scaling is a section"),
    # values of the wrong kind
    ("train: {steps: many}", "train.steps must be a whole number, not 'many'"),
    ("train: {steps: 1.5}", "train.steps must be a whole number, not 1.5"),
    ("train: {steps: 15e-1}", "train.steps must be a whole number, not 1.5"),
    ("train: {steps: true}", "train.steps is a number, not true or false"),
    ("train: {steps: null}", "train.steps must be a whole number, not None"),
    ("train: {steps: ''}", "train.steps must be a whole number, not ''"),
    ("train: {steps: [3]}", "train.steps must be a whole number, not [3]"),
    ("train: {steps: {a: 1}}", "train.steps must be a whole number, not {'a': 1}"),
    ("train: {steps: 2001-01-01}", "train.steps must be a whole number"),
    ("train: {steps: .inf}", "train.steps must be a finite number, not inf"),
    ("train: {micro_batch: 3.5}", "train.micro_batch must be a whole number or 'auto', not 3.5"),
    ("train: {micro_batch: [auto]}", "train.micro_batch must be a whole number or 'auto', not ['auto']"),
    ("train: {micro_batch: Auto}", "train.micro_batch must be a whole number or 'auto', not 'Auto'"),
    ("train: {compile: maybe}", "train.compile must be true or false or 'auto', not 'maybe'"),
    ("train: {compile: 2}", "train.compile must be true or false or 'auto', not 2"),
    ("train: {dtype: fp8}", "train.dtype must be 'auto', 'bf16', 'fp16', 'fp32', 'fp64' or 'mixed', not 'fp8'"),
    ("train: {dtype: 32}", "train.dtype must be 'auto', 'bf16', 'fp16', 'fp32', 'fp64' or 'mixed', not 32"),
    (
        "balance: {batch: fast}",
        "balance.batch must be 'auto', 'even', 'measured-once' or a list of whole numbers >= 0",
    ),
    ("balance: {batch: []}", "or a list of whole numbers >= 0, not []"),
    ("balance: {batch: [3, -1]}", "or a list of whole numbers >= 0, not [3, -1]"),
    ("balance: {batch: [3.5]}", "or a list of whole numbers >= 0, not [3.5]"),
    ("balance: {batch: true}", "or a list of whole numbers >= 0, not True"),
    (
        GOOD + "balance: {batch: [30, 1]}",
        "balance.batch sums to 31 sequences, but train.glob",
    ),
    ("optim: {schedule: cosign}", "optim.schedule must be 'cosine', 'linear', 'constant', 'polynomial', 'wsd' or a f"),
    ("optim: {lr: fast}", "optim.lr must be a number, not 'fast'"),
    ("optim: {lr: true}", "optim.lr is a number, not true or false"),
    ("optim: {lr: [1e-3]}", "optim.lr must be a number"),
    ("optim: {lr: .nan}", "optim.lr must be a finite number, not nan"),
    ("optim: {lr: .inf}", "optim.lr must be a finite number, not inf"),
    ("optim: {lr: 1.0e+999}", "optim.lr must be a finite number, not inf"),
    ("optim: {weight_decay: -.inf}", "optim.weight_decay must be"),
    ("optim: {options: 3}", "optim.options must be a mapping of names to values, not 3"),
    ("optim: {options: {momentum: []}}", "optim.options.momentum must be true or false or a whole number or a number"),
    ("data: {validation: [a]}", "data.validation must be a mapping of names to values, not ['a']"),
    ("data: {validation: {mine: 3}}", "data.validation.mine must be text or a list of texts, not 3"),
    ("model: {tie_embeddings: perhaps}", "model.tie_embeddings must be true or false, not 'perhaps'"),
    ("model: {preset: 5}", "model.preset must be text"),
    ("data: {source: 5}", "data.source must be text or a list of texts, not 5"),
    ("data: {source: {}}", "data.source has an entry whose path is None; write it as {path: FILES, weight: NUMBER}"),
    ("data: {source: []}", "data.source must be a non-empty list, not []"),
    ("data: {source: [a, 2]}", "data.source must be text (put it in quotes), not 2"),
    ("data: {source: [[a]]}", "data.source must be text (put it in quotes), not ['a']"),
    ("data: {source: [null]}", "data.source must be text"),
    ("data: {source: &x [*x]}", "data.source must be text"),
    ("data: {source: !!binary aGk=}", "data.source must be text or a list"),
    ("data: {tokenizer: 7}", "data.tokenizer must be text (put it in quotes), not 7"),
    ("data: {text_key: yes}", "data.text_key must be text (put it in quotes), not True"),
    ('data: {text_key: "\\ud800"}', "data.text_key has a character that is not text; remove it"),
    ('data: {source: "a\\0b"}', "data.source has a character that is not text; remove it"),
    ('data: {cache: "a\\0b"}', "data.cache has a character that is not text; remove it"),
    # numbers outside what can be
    ("train: {steps: -1}", "train.steps must be at least 0, not -1"),
    ("train: {global_batch: 0}", "train.global_batch must be at least 1, not 0"),
    ("train: {seed: -1}", "train.seed must be at least 0, not -1"),
    ("train: {steps: 99999999999999999999999}", "train.steps must be at most 9007199254740992"),
    ("model: {layers: 0}", "model.layers must be at least 1, not 0"),
    ("model: {dropout: 1}", "model.dropout must be below 1, not 1"),
    ("model: {dropout: -0.1}", "model.dropout must be at least 0, not -0.1"),
    ("model: {dropout: .nan}", "model.dropout must be"),
    ("model: {norm_eps: 0}", "model.norm_eps must be above 0, not 0"),
    ("data: {tokenizer_vocab: 256}", "data.tokenizer_vocab must be at least 257, not 256"),
    ("data: {tokenizer_vocab: 9999999}", "data.tokenizer_vocab must be at most 1048576"),
    ("data: {held_out: 1}", "data.held_out must be below 1, not 1"),
    ("optim: {lr: 0}", "optim.lr must be above 0, not 0"),
    ("optim: {beta1: 1}", "optim.beta1 must be below 1, not 1"),
    ("optim: {min_lr_ratio: 1.5}", "optim.min_lr_ratio must be at most 1, not 1.5"),
    ("optim: {clip_norm: 0}", "optim.clip_norm must be above 0, not 0"),
    ("train: {loss_scale: 1.0e+39}", "train.loss_scale must be at most 1e+30, not 1e+39"),
    ("train: {loss_scale: 1.0e-46}", "train.loss_scale must be at least 0.001, not 1e-46"),
    ("checkpoint: {keep: 0}", "checkpoint.keep must be at least 1, not 0"),
    ("comm: {timeout_s: 0}", "comm.timeout_s must be above 0, not 0"),
    ("comm: {timeout_s: 1.0e+300}", "comm.timeout_s must be at most 604800, not 1e+300"),
    (
        "resilience: {replicate_every: every_step, in_memory_checkpoints: false}",
        "resilience.replicate_every every_step needs resilience.in_memory_checkpoints, which is false",
    ),
    (
        "resilience: {replicate_every: 8, in_memory_checkpoints: false}",
        "resilience.replicate_every 8 needs resilience.in_memory_checkpoints, which is false",
    ),
    ("resilience: {replicate_every: 1}", "resilience.replicate_every must be"),
    ("resilience: {max_restarts: -1}", "resilience.max_restarts must be at least 0, not -1"),
    ("comm: {compress: int4}", "comm.compress must be"),
    ("model: {rope_scaling: {factor: -5}}", "model.rope_scaling.factor must be above 0, not -5"),
    # numbers that do not go together
    ("", "model.hidden, model.layers, model.heads must be set, or model.preset, or model.from_hf"),
    ("model: {hidden: 16}", "model.layers, model.heads must be set"),
    ("model: {preset: llama-3-8b, from_hf: x}", "model.preset and model.from_hf both set the shapes"),
    ("model: {preset: t5}", "model.preset 't5' is not known; see `phalanx config presets`"),
    ("model: {preset: llama-3-9b}", "model.preset 'llama-3-9b' is not known; did you mean llama-3-8b?"),
    ("model: {from_hf: x, hidden: 5, vocab_size: 9}", "model.hidden, model.vocab_size cannot be combined with mod"),
    ("model: {hidden: 16, layers: 1, heads: 3}", "model.hidden is 16 and model.heads is 3"),
    ("model: {hidden: 16, layers: 1, heads: 4, kv_heads: 3}", "model.kv_heads is 3"),
    ("model: {hidden: 16, layers: 1, heads: 16}", "model.head_dim is 1"),
    ("model: {hidden: 16, layers: 1, heads: 2, head_dim: 7}", "model.head_dim is 7"),
    ("model: {preset: llama-3-8b, kv_heads: 5}", "model.kv_heads is 5"),
    ("model: {hidden: 16, layers: 1, heads: 2, rope_scaling: {low_freq_factor: 9}}", "model.rope_scaling.high_freq"),
    (GOOD + "data: {seq_len: 10}\n" + "train: {global_batch: 2, micro_batch: 3}", "train.micro_batch 3 is larger than"),
    (GOOD + "optim: {warmup_steps: 9, decay_steps: 8}", "optim.warmup_steps 9 exceeds optim.decay_steps 8; lower it"),
    (GOOD + "data: {held_out: 0}\ntrain: {eval_every: 5}", "train.eval_every needs held-out documents, but"),
    (GOOD + "data: {source: [{path: a, weight: 4095}, {path: b, weight: 0.9}]}", "gives b the weight 0.9, less than"),
    (GOOD + "data: {source: [{path: a}, b, {weight: 2}]}", "data.source has an entry whose path is None; write it as"),
    (GOOD + "data: {source: [{path: [a, 3]}]}", "data.source has an entry whose path is ['a', 3]; write it as"),
    (GOOD + 'data: {source: [a, "\\ud800"]}', "r.yaml: data.source has a character that is not text; remove it"),
    (GOOD + "data: {cache: ''}", "data.cache is empty; set it to a folder"),
    (GOOD + "data: {source: {path: a, weight: 0}}", "data.source has an entry whose weight is 0; give it a number"),
    (GOOD + "data: {source: {path: a, weight: .inf}}", "data.source has an entry whose weight is inf; give it a"),
    (GOOD + "data: {source: {path: a, share: 1}}", "data.source has an entry with the unknown key 'share'; it"),
    (GOOD + "data: {validation: {held_out: a}}", "data.validation has a set named held_out"),
    (GOOD + "data: {loss_on: all}", "data.loss_on is for conversations and prompts, but data.format is text"),
    (GOOD + "data: {too_long: drop}", "data.too_long is for conversations and prompts, but data.format is text"),
    ("model: {preset: llama-3-8b}\ndata: {seq_len: 9000}", "data.seq_len 9000 is longer than the model's 8192 pos"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_recipe_is_a_sentence(text: str, sentence: str) -> None:
    found = refusal(text)
    assert found.startswith("r.yaml")
    assert sentence in found
    assert "\n" not in found or " problems:\n" in found
    assert len(found) < 700  # which the list of all presets comes near to
    assert "Traceback" not in found and "pydantic" not in found and "Error" not in found


def test_there_are_more_than_a_hundred_malformed_recipes() -> None:
    assert len({text for text, _ in MALFORMED}) == len(MALFORMED) > 100


def test_all_problems_come_at_once() -> None:
    found = refusal("trian: {}\ntrain: {steps: -1, seed: x, micro_batch: 1.5}\noptim: {lr: 0}")
    assert found.splitlines() == [
        "r.yaml has 6 problems:",
        "  - train.steps must be at least 0, not -1",
        "  - train.micro_batch must be a whole number or 'auto', not 1.5",
        "  - train.seed must be a whole number, not 'x'",
        "  - optim.lr must be above 0, not 0",
        "  - unknown key trian; did you mean train?",
        "  - model.hidden, model.layers, model.heads must be set, or model.preset, or model.from_hf",
    ]
    impossible = "model: {hidden: 20, layers: 1, heads: 8, kv_heads: 3}\ntrain: {micro_batch: 99}"
    assert refusal(impossible).startswith("r.yaml has 3 problems:\n  - model.heads is 8 and model.kv_heads is 3")


def test_a_value_is_shown_in_brief() -> None:
    """Nine aliases of nine aliases: nine to the ninth words if it were spelled out."""
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    assert len(refusal(bomb + "train: {steps: *a9}")) < 2000
    assert "'xxxxx" in (found := refusal(f"train: {{steps: {'x' * 10**5}}}")) and len(found) < 300


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"train: {}\n# caf\xe9")
    for name, words in (
        ("none.yaml", "no recipe .*none.yaml; `phalanx recipes list` shows"),
        ("latin.yaml", "cannot read the recipe .*latin.yaml .*give a YAML text file"),
        ("", "cannot read the recipe .*Is a directory.*give a YAML text file"),
        ("latin.yaml/below", "cannot read the recipe .*below .*Not a directory"),
    ):
        with pytest.raises(ConfigError, match=words):
            load.load_recipe(tmp_path / name)


@pytest.mark.parametrize(
    ("parallel", "world", "sentence"),
    [
        ({"tensor": 2}, 1, "1 rank cannot hold copies of a model on 2 ranks each (parallel.tensor=2)"),
        ({"pipeline": 2}, 3, "3 ranks cannot hold copies of a model on 2 ranks each (parallel.pipeline=2)"),
        ({"tensor": 2, "shard_degree": 2}, 2, "parallel.shard_degree 2 shards the state over 2 copies of the model"),
        ({"tensor": 2, "shard_degree": 4}, 4, "parallel.shard_degree 4 does not divide the 2 ranks with the same"),
    ],
)
def test_ranks_that_hold_a_model_together_must_come_out_even(
    parallel: dict[str, int], world: int, sentence: str
) -> None:
    shape = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 64}
    config = load.build_config({"model": shape, "data": {"source": "x.txt"}, "parallel": parallel}, "here")
    with pytest.raises(ConfigError) as error:
        resolve.resolve_autos(config, device="cpu", world=world)
    assert str(error.value).startswith(sentence)
