"""A model of one's own: what is wrong with its file is one sentence, and the run keeps what it was trained with."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.config import load
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.generate.text import Sampling, load_generator
from phalanx.launch import child_run
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import parameter_count, parameter_shapes
from phalanx.models.hf_config import BASE_KEY, config_from_spec, spec_from_config
from phalanx.models.llama import Llama
from phalanx.models.user_model import check_model_class, load_model_class, shapes_of
from phalanx.trainer import run_folder
from tests.dist import command
from tests.helpers import ROOT

SPEC = ModelSpec(vocab_size=96, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, max_seq_len=64)
EXAMPLE = ROOT / "examples" / "custom_model.py"
HEAD = "import torch\nfrom torch import nn\nfrom phalanx.models.llama import HF_NAMES, Llama, llama_init_rule\n"


def test_without_a_file_it_is_the_built_in_class() -> None:
    assert load_model_class(None) is Llama
    assert shapes_of(Llama, SPEC) == parameter_shapes(SPEC)
    assert check_model_class(Llama, SPEC) == parameter_count(SPEC)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_shapes_of_the_built_in_class_are_those_that_need_no_torch(architecture: str, tied: bool) -> None:
    spec = replace(SPEC, architecture=architecture, tie_embeddings=tied, head_dim=12)
    assert shapes_of(Llama, spec) == parameter_shapes(spec)


BROKEN = {
    "no class Model": "x = 1",
    "not a subclass": "class Model:\n    pass",
    "line 2": "x = 1\nraise ValueError('no luck')",
    "no luck": "raise ValueError('no luck')",
    "in line 3": "x = 1\n\ndef f(:\n",
    "No module named 'nowhere'": "import nowhere",
    "SystemExit: 0 in line 2": "import sys\nsys.exit(0)",
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_broken_file_is_one_sentence(sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(BROKEN[sentence])
    with pytest.raises(ConfigError) as caught:
        load_model_class(path)
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.py is not a file"):
        load_model_class(tmp_path / "gone.py")
    (tmp_path / "own.txt").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"ends in \.py"):
        load_model_class(tmp_path / "own.txt")


LATE = {
    "buffer frequencies": "self.register_buffer('frequencies', torch.zeros(3))",
    "parameter extra.weight outside": "self.extra = nn.Linear(3, 3, bias=False)",
    "no Hugging Face name for its parameter layers.0.extra.weight": "self.layers[0].extra = nn.Linear(3, 3)",
    "several names (layers.1.mlp.up.weight is": "self.layers[1].mlp.up.weight = self.layers[0].mlp.up.weight",
    "freezes embed.weight": "self.embed.requires_grad_(False)",
    "cannot be built: RuntimeError: oh no in line 8": "raise RuntimeError('oh no')",
    "cannot run: TypeError": "self.layers[0].forward = lambda x: x",
    "returns no sum of losses": "self.head.forward = lambda hidden, *rest: hidden",
}


@pytest.mark.parametrize("sentence", LATE)
def test_a_class_that_would_fail_later_is_refused_at_once(sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    text = f"{HEAD}\nclass Model(Llama):\n    def __init__(self, spec):\n        super().__init__(spec)\n        "
    path.write_text(text + LATE[sentence] + "\n")
    with pytest.raises(ConfigError) as caught:
        check_model_class(load_model_class(path), SPEC)
    assert sentence in str(caught.value)


def test_dropout_of_attention_must_reach_it(tmp_path: Path) -> None:
    spec, path = replace(SPEC, attention_dropout=0.1), tmp_path / "own.py"
    path.write_text(
        "from phalanx.models import llama\nclass Block(llama.Block):\n"
        "    def forward(self, x, cos, sin, *rest):\n        return x + self.attention(x, cos, sin)\n"
        "class Model(llama.Llama):\n    block = Block\n"
    )
    assert check_model_class(load_model_class(path), SPEC) > 0
    with pytest.raises(ConfigError, match=r"attention_dropout needs blocks that hand .draws. and .site. on"):
        check_model_class(load_model_class(path), spec)
    path.write_text("from phalanx.models import llama\nclass Model(llama.Llama):\n    pass\n")
    assert check_model_class(load_model_class(path), spec) > 0


def test_a_start_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"{HEAD}\nclass Model(Llama):\n    initial = staticmethod(lambda name, spec: ('twos',))\n")
    with pytest.raises(ConfigError, match=r"cannot initialize embed\.weight: .*twos"):
        check_model_class(load_model_class(path), SPEC)


def test_two_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        f"{HEAD}\nclass Model(Llama):\n"
        "    hf_names = HF_NAMES | {'layers.{i}.mlp_norm.weight': 'model.layers.{i}.input_layernorm.weight'}\n"
    )
    with pytest.raises(ConfigError, match=r"mlp_norm.weight one Hugging Face name, model\.layers\.0\.input_layernorm"):
        check_model_class(load_model_class(path), SPEC)


def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"{HEAD}\nclass Model(Llama):\n    mark = 1\n")
    first = load_model_class(path)
    assert load_model_class(path) is first
    path.write_text(f"{HEAD}\nclass Model(Llama):\n    mark = 22\n")
    assert vars(load_model_class(path))["mark"] == 22


def test_its_config_json_says_whose_it_is_and_what_it_is_built_on() -> None:
    import torch

    own = load_model_class(EXAMPLE)
    spec = replace(SPEC, architecture="qwen3", head_dim=16)
    config = config_from_spec(spec, torch.float32, own=own.hf_config)
    assert (config["architectures"], config["model_type"]) == (["SquaredLlamaForCausalLM"], "squared_llama")
    assert (config["hidden_act"], config[BASE_KEY]) == ("relu2", "qwen3")
    assert spec_from_config(config, "config.json", own.hf_config) == spec
    with pytest.raises(ConfigError, match=r"SquaredLlamaForCausalLM.* or set model\.code to the file"):
        spec_from_config(config, "config.json")
    with pytest.raises(ConfigError, match=BASE_KEY):
        spec_from_config(config | {BASE_KEY: "gpt"}, "config.json", own.hf_config)
    # The built-in architectures are read too: a model of one's own may start from their weights.
    assert spec_from_config(config_from_spec(SPEC, torch.float32), "config.json", own.hf_config) == SPEC


def test_a_run_keeps_the_file_and_goes_on_with_no_other(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text(f"{HEAD}\nclass Model(Llama):\n    pass\n")
    tree = {"model": {"hidden": 16, "layers": 1, "heads": 2, "code": str(code), "vocab_size": 64}}
    config = load.build_config(tree, "the test's recipe")
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    run_folder.check_run_code(paths, config, resuming=False)
    run_folder.write_start(paths, config, tmp_path)
    assert paths.model_code.read_text() == code.read_text()
    run_folder.check_run_code(paths, config, resuming=True)
    code.write_text(code.read_text() + "# another\n")
    with pytest.raises(RunError, match="is not what the run"):
        run_folder.check_run_code(paths, config, resuming=True)
    paths.model_code.unlink()
    with pytest.raises(RunError, match=r"model\.py is gone"):
        run_folder.check_run_code(paths, config, resuming=True)


def test_the_example_trains_goes_on_exports_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(child_run, "train_in_child", command.train_in_warm_child)
    example = runpy.run_path(str(EXAMPLE))
    assert example["main"](tmp_path / "own") < 1e-5
    kept = tmp_path / "own" / "run" / "model.py"
    assert kept.read_text() == EXAMPLE.read_text()
    # What writes text with the run takes the class from there, and lets it make itself known to transformers.
    own, asked = load_model_class(kept), list[None]()
    known = own.register
    monkeypatch.setattr(own, "register", staticmethod(lambda: asked.append(known())))
    with load_generator(kept.parent, Sampling(max_tokens=3)) as writer:
        assert type(writer.model).__name__ == "SquaredLlamaForCausalLM"
        assert writer.complete("import", show=False, echo=False)
    assert asked == [None]
