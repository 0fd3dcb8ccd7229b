"""A task of a user's own: what is wrong with its file, network or data is one sentence, before anything runs."""

import gzip
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.autotune.dry_run import dry_run
from phalanx.cli import data
from phalanx.config import load, resolve
from phalanx.core.errors import CheckpointError, ConfigError, DataError
from phalanx.core.json_lines import append_line
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.data.images import load_mnist
from phalanx.generate.text import Sampling, load_generator
from phalanx.models.model import Model
from phalanx.report import event_text, html, views
from phalanx.report.history import read_run_history
from phalanx.tasks.task import Batch
from phalanx.trainer import run_folder
from phalanx.trainer.export import export_run
from phalanx.trainer.resolve import resolve_with_files
from phalanx.workload.custom import CustomWorkload
from phalanx.workload.custom_checks import check_custom_task
from phalanx.workload.sinks import evaluation_scalars
from tests.helpers import ROOT

EXAMPLE = ROOT / "examples" / "vision_task.py"
SOUND = """
import torch
from torch import nn
from phalanx.models.model import Model
from phalanx.tasks.task import CustomTask
from phalanx.tasks.task import Batch

class Net(Model):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.body(x).tanh())

class Task(CustomTask):
    def model(self):
        return Net()
    def train(self):
        return [torch.full((3,), float(i)) for i in range(6)]
    def held_out(self):
        return [torch.ones(3)]
    def collate(self, samples):
        return Batch({"x": torch.stack(samples)}, len(samples))
    def loss_sum(self, model, batch, draws):
        return (model(batch.inputs["x"]) - 1).square().sum()
"""


def own_of(text: str, tmp_path: Path, **train: Any) -> tuple[CustomWorkload, load.Config]:
    path = tmp_path / "own.py"
    path.write_text(text)
    tree = {"task": {"code": str(path)}, "train": {"global_batch": 4, "micro_batch": 2} | train}
    config = load.build_config(tree, "the test's recipe")
    return CustomWorkload(config), config


def refusal(text: str, tmp_path: Path, **train: Any) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        check_custom_task(*own_of(text, tmp_path, **train))
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(tmp_path / "own.py") in sentence or "train." in sentence
    return sentence


def test_a_sound_task_is_counted(tmp_path: Path) -> None:
    own, config = own_of(SOUND, tmp_path)
    assert check_custom_task(own, config) == 3 * 4 + 4 + 4 + 1
    assert [name for name, _ in own.model().units()] == ["body", "head"]
    assert own.flops() == (6 * (3 * 4 + 4) - 2 * 3 * 4,) * 2  # what comes in needs no gradient


BROKEN_FILES = {
    "defines no class Task": "x = 1",
    "is not a subclass of phalanx.tasks.task.CustomTask": "class Task:\n    pass",
    "cannot be run: ValueError: no luck in line 1": "raise ValueError('no luck')",
    "Task(**task.options) fails: TypeError": "from phalanx.tasks.task import CustomTask\n"
    "class Task(CustomTask):\n    def __init__(self, folder):\n        pass\n",
}


@pytest.mark.parametrize("sentence", BROKEN_FILES)
def test_a_broken_file_is_a_sentence(sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(BROKEN_FILES[sentence], tmp_path)


def test_an_option_that_the_class_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(SOUND)
    config = load.build_config({"task": {"code": str(path), "options": {"depth": 3}}}, "here")
    with pytest.raises(ConfigError, match=r"task\.options\) fails: TypeError: Task"):
        CustomWorkload(config)
    config = load.build_config({"task": {"code": str(tmp_path / "gone.py")}}, "here")
    with pytest.raises(ConfigError, match=r"task\.code .*gone\.py is not a file"):
        CustomWorkload(config)


# What must be said -> what of the sound file is replaced, and by what.
SPOILED = {
    "has no train()": ("def train", "def trains"),
    "has no collate(samples)": ("def collate", "def collates"),
    "has no loss_sum(model, batch, draws)": ("def loss_sum", "def losses"),
    "model() returns no phalanx.models.model.Model but a Linear": ("return Net()", "return nn.Linear(3, 1)"),
    "model() fails: RuntimeError: oh no in line 18": ("return Net()", "raise RuntimeError('oh no')"),
    "a BatchNorm: an evaluation would depend on how its samples are divided": (
        "nn.Linear(3, 4)", "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))"),
    "unit body.0 is called 2 times in a pass": (
        "self.head(self.body(x).tanh())", "self.head((self.body(x) + self.body[0](x)).tanh())"),
    "take 2343 KiB, more than the 900 KiB that are kept of each step": (
        "nn.Linear(3, 4)", "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(225_000))"),
    "a Dropout: its random numbers are the process's": ("nn.Linear(3, 4)", "nn.Sequential(nn.Dropout())"),
    "a pass changes the buffer n, so that each rank would have another": (
        "        return self.head(", "        self.n += 1\n        return self.head("),
    "returns no tensor of shape (2,) from constant('table', (2,))": (
        "        self.head = nn.Linear(4, 1)\n", "        self.head = nn.Linear(4, 1)\n"
        "        self.register_buffer('table', torch.ones(2))\n    def constant(self, *_):\n        return 3\n"),
    "has the buffer table; override its method constant, which returns the values": (
        "self.head = nn.Linear(4, 1)", "self.head = nn.Linear(4, 1); self.register_buffer('table', torch.ones(2))"),
    "has one parameter under several names (head.bias": (
        "self.head = nn.Linear(4, 1)", "self.head = nn.Linear(4, 4); self.head.bias = self.body.bias"),
    "has no parameters": (
        "nn.Linear(3, 4)\n        self.head = nn.Linear(4, 1)", "nn.Tanh()\n        self.head = nn.Tanh()"),
    "has scale, a parameter without dims": (
        "self.head = nn.Linear(4, 1)", "self.head = nn.Linear(4, 1); self.scale = nn.Parameter(torch.ones(()))"),
    "has head.weight, which takes no gradient": (
        "self.head = nn.Linear(4, 1)", "self.head = nn.Linear(4, 1).requires_grad_(False)"),
    "start('body.weight', ...) fails: ValueError: body.weight is initialized as ('twos',)": (
        "    def forward", "    def start(self, name, shape):\n        return ('twos',)\n    def forward"),
    "unit head is called 0 times": ("self.head(self.body(x).tanh())", "self.body(x).tanh()"),
    "loss_sum does not call the model": ('model(batch.inputs["x"])', 'model.head(model.body(batch.inputs["x"]))'),
    "collate returns a dict, not phalanx.tasks.task.Batch": (
        'Batch({"x": torch.stack(samples)}, len(samples))', '{"x": torch.stack(samples)}'),
    "collate(samples) fails: TypeError": (", len(samples))", ")"),
    "the weight -1, but a weight is a whole number": ("len(samples))", "-len(samples))"),
    "the weight 1.0, but a weight is a whole number": ("len(samples))", "float(len(samples)))"),
    "two samples the weight 7, but one by one they weigh 7 and 7": ("len(samples))", "7)"),
    "are a dictionary of tensors": ('{"x": torch.stack(samples)}', '{"x": samples}'),
    "loss_sum returns a tensor of shape (2, 1), not the sum": (".square().sum()", ".square()"),
    "loss_sum returns a float": (".square().sum()", ".square().sum().item()"),
    "loss_sum must be a sum over samples": (".square().sum()", ".square().mean()"),
    "the first loss is nan": (".square().sum()", ".log().sum()"),
    "nominal_weight returns 0": ("    def model", "    def nominal_weight(self, n):\n        return 0\n    def model"),
    "train() of task.code": ("range(6)", "range(3)"),
    "has 3 samples, fewer than one global batch of 4; add data": ("range(6)", "range(3)"),
    "has 0 samples, fewer than one global batch of 4": ("range(6)", "range(0)"),
    "sample 1 of train() fails: ValueError: torn in line 12": (
        "class Net(", "class Torn:\n    def __len__(self):\n        return 6\n    def __getitem__(self, i):\n"
        "        if i: raise ValueError('torn')\n        return torch.ones(3)\nclass Net("),
    "held_out() of task.code": ("[torch.ones(3)]", "[]"),
    "the first sample makes other x when it is asked for again": (
        "torch.stack(samples)", "torch.stack(samples) + torch.rand(3)"),
    "counts returns no dictionary of one-element tensors": (
        "    def model", "    def counts(self, model, batch):\n        return {'right': 3}\n    def model"),
    "has body.weight, whose shape is not set (a Lazy layer)": ("nn.Linear(3, 4)", "nn.LazyLinear(4)"),
    "loss_sum returns a tensor of whole numbers": (".square().sum()", ".square().sum().long()"),
    "the loss does not depend on the network as far as gradients go": (".square().sum()", ".square().sum().detach()"),
    "loss_sum(model, batch, draws) fails: ValueError: only then in line 26": (
        "        return (model", "        if draws: raise ValueError('only then')\n        return (model"),
    "the loss of two samples with dropout is": (
        '        return (model(batch.inputs["x"]) - 1).square().sum()',
        "        self.calls = vars(self).get('calls', 0) + 1\n"
        "        return (model(batch.inputs['x']) - 1).square().sum() * (self.calls if draws else 1)"),
    "held_out() gives a set the name 'train'": ("return [torch.ones(3)]", "return {'train': [torch.ones(3)]}"),
    "held_out() gives a set the name 7": ("return [torch.ones(3)]", "return {7: [torch.ones(3)]}"),
    "counts gives 1.5 for mean of two samples, but one by one 1 and 2": (
        "    def model", "    def counts(self, model, batch):\n        return {'mean': batch.inputs['x'].mean() + 1}\n"
        "    def model"),
    "scores returns no dictionary of numbers": (
        "    def model", "    def counts(self, model, batch):\n        return {'n': torch.tensor(batch.weight)}\n"
        "    def scores(self, counts):\n        return {'n': 'many'}\n    def model"),
    "scores(counts) fails: KeyError": (
        "    def model", "    def counts(self, model, batch):\n        return {'right': torch.tensor(1)}\n"
        "    def scores(self, counts):\n        return {'accuracy': counts['wrong']}\n    def model"),
}  # fmt: skip


@pytest.mark.parametrize("sentence", SPOILED)
def test_a_task_that_would_fail_later_is_refused_at_once(sentence: str, tmp_path: Path) -> None:
    old, new = SPOILED[sentence]
    assert SOUND.count(old) >= 1
    text = SOUND.replace(old, new, 1)
    if sentence.startswith("a pass changes"):
        text = text.replace(
            "        self.head =", "        self.register_buffer('n', torch.zeros(1))\n        self.head ="
        ).replace("    def forward", "    def constant(self, *_):\n        return torch.zeros(1)\n    def forward")
    if "unit body.0" in sentence:
        text = text.replace("nn.Linear(3, 4)", "nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))")
    if sentence.startswith("sample 1"):
        text = text.replace("[torch.full((3,), float(i)) for i in range(6)]", "Torn()")
    assert sentence in refusal(text, tmp_path)


def test_scores_need_not_be_made_of_one_sample_alone(tmp_path: Path) -> None:
    text = SOUND.replace(
        "    def model",
        "    def counts(self, model, batch):\n        return {'n': torch.tensor(batch.weight)}\n"
        "    def scores(self, counts):\n        return {'n': 1 / (counts['n'] - 1)}\n    def model",
    )
    check_custom_task(*own_of(text, tmp_path))


def test_scores_that_fail_in_the_run_are_a_sentence(tmp_path: Path) -> None:
    text = SOUND.replace(
        "    def model",
        "    def counts(self, model, batch):\n        return {'n': torch.tensor(batch.weight)}\n"
        "    def scores(self, counts):\n        return {'n': 1 / (counts['n'] - 6)}\n    def model",
    )
    own, config = own_of(text, tmp_path)
    check_custom_task(own, config)
    with pytest.raises(ConfigError, match=r"scores\(counts\) fails: ZeroDivisionError.* in line 20; fix it"):
        own.task().scores({"n": 6.0})


def test_evaluations_need_samples(tmp_path: Path) -> None:
    text = SOUND.replace("return [torch.ones(3)]", "return None")
    check_custom_task(*own_of(text, tmp_path))
    assert "held_out() of task.code" in refusal(text, tmp_path, eval_every=2)


# What is set beside task.code or without it -> what is said.
COMBINATIONS: list[tuple[dict[str, Any], str]] = [
    ({"task": {"kind": "custom"}}, "task.kind custom needs task.code"),
    ({"task": {"kind": "language", "code": "x.py"}}, "task.code defines a custom task, but task.kind is language"),
    ({"task": {"options": {"a": 1}}, "model": {"preset": "llama-3-8b"}}, "task.options has no effect"),
    ({"task": {"code": "x.py"}, "model": {"hidden": 8, "dropout": 0.1}}, "model.hidden, model.dropout has no effect"),
    ({"task": {"code": "x.py"}, "data": {"seq_len": 9, "cache": "c"}}, "data.seq_len has no effect with"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "sentence"), COMBINATIONS)
def test_keys_that_do_not_go_together_are_named(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.build_config(tree, "here")
    assert sentence in str(caught.value)


def test_without_samples_there_is_a_batch_that_weighs_nothing(tmp_path: Path) -> None:
    own, _ = own_of(SOUND, tmp_path)
    task = own.task()
    batch = task.collate([])
    assert batch.weight == 0
    assert batch.inputs["x"].shape == (1, 3)
    net = nn.Linear(3, 1)
    loss = task.loss_sum(net, batch, None)
    loss.backward()
    assert loss.item() == 0.0
    assert float(net.weight.grad.abs().sum()) == 0.0  # type: ignore[union-attr]
    some = task.collate(own.make_probe_samples(3))
    assert (some.weight, some.samples.tolist()) == (3, [0, 1, 2])


def test_parameters_start_as_their_shape_says() -> None:
    class Net(Model):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 16))
            self.layers = nn.ModuleList(nn.Conv2d(2, 3, 5) for _ in range(2))
            self.norm = nn.LayerNorm(9)
            self.tail = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2))

    net = Net()
    assert [name for name, _ in net.units()] == ["layers.0", "layers.1", "norm", "tail.0", "tail.2"]
    assert net.blocks() == list(net.layers)
    starts = {name: net.start(name, tuple(each.shape)) for name, each in net.named_parameters()}
    assert starts["norm.weight"] == ("ones",)
    assert starts["norm.bias"] == starts["layers.0.bias"] == ("zeros",)
    assert starts["layers.1.weight"] == ("normal", 1 / math.sqrt(2 * 5 * 5))
    assert starts["token"] == ("normal", 0.25)


def test_a_changed_data_set_is_another(tmp_path: Path) -> None:
    own, _ = own_of(SOUND, tmp_path)
    before = own.fingerprints()
    assert before["train"]["samples"] == 6
    assert set(before) == {"train", "held_out"}
    assert own_of(SOUND + "\n", tmp_path)[0].fingerprints() == before
    after = own_of(SOUND.replace("float(i)", "float(i + (i == 5))"), tmp_path)[0].fingerprints()
    assert after["train"] != before["train"]
    assert after["held_out"] == before["held_out"]


def test_the_run_keeps_code_and_goes_on_with_no_other(tmp_path: Path) -> None:
    from phalanx.core.errors import RunError

    own, config = own_of(SOUND, tmp_path)
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    resolved, _ = resolve.resolve_autos(config, device="cpu", world=1)
    answer = resolve_with_files(load.to_yaml(resolved), ["cpu"], 1, 1, None)
    assert (answer["tokenizer"], answer["unit"], answer["parameters"]) == (None, "samples", 21)
    run_folder.check_run_data(paths, answer["data"], resuming=False)
    run_folder.write_start(paths, config, None)
    assert paths.task_code.read_text() == SOUND
    own.file.write_text("raise ValueError('another')")
    assert CustomWorkload(config, paths).file == paths.task_code.resolve()  # ranks read the copy
    with pytest.raises(
        RunError, match=rf"task\.code .*own\.py is not what the run .* or copy it to {paths.task_code} if"
    ):
        run_folder.check_run_code(paths, config, resuming=True)
    shutil.copyfile(own.file, paths.task_code)  # the way out that it names
    run_folder.check_run_code(paths, config, resuming=True)
    changed = {name: one | {"known_by": "other"} for name, one in answer["data"].items()}
    with pytest.raises(RunError, match="train and held_out samples differ"):
        run_folder.check_run_data(paths, changed, resuming=True)


def test_a_dry_run_counts_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.autotune.dry_run.MODES", ("none", "full"))
    config = load.load_recipe(ROOT / "recipes" / "digits.yaml", [f"task.code={EXAMPLE}"])
    found = dry_run(config, 2)
    assert found["model"]["parameters"] == sum(found["model"]["parts"].values()) == 56394
    assert found["work"]["unit"] == "samples"
    assert found["work"]["tokens_per_step"] == 64
    convolution = 2 * 32 * 9 * 64  # FLOPs of one input channel forward, on 8 x 8 pixels
    assert found["work"]["flops_per_token"] > 6 * 32 * 3 * convolution  # six convolutions, forward and twice backward
    assert 0 < found["sequence"]["full"] <= found["sequence"]["none"]


# ------------------------------------------------------------------------------------------------------------- scores


def test_scores_are_shown_everywhere() -> None:
    event = {"kind": "evaluated", "step": 5, "set": "held_out", "loss": 0.25, "tokens": 9, "unit": "samples"}
    assert event_text.describe_event(event) == "held-out loss 0.2500 after step 5"
    scored = event | {"scores": {"accuracy": 0.75, "f1": 0.5}}
    assert event_text.describe_event(scored) == "held-out loss 0.2500, accuracy 0.7500, f1 0.5000 after step 5"
    assert "perplexity 1.3" in event_text.describe_event({**event, "unit": "tokens"})
    assert evaluation_scalars(scored) == {
        "eval/held_out": 0.25,
        "eval/held_out accuracy": 0.75,
        "eval/held_out f1": 0.5,
    }
    [(name, _, score), (_, have, _)] = views.score_curves([event, scored])
    assert (name, score, len(have)) == ("accuracy", "accuracy", 1)
    table = "".join(views.render_eval_card([scored, scored | {"set": "far"}]))
    assert all(cell in table for cell in ("<th>accuracy</th>", "<th>losses</th>", "<td>0.7500</td>", "<td>far</td>"))


def test_the_report_draws_scores_and_speaks_of_samples(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write_event(paths.events, EventKind.RUN_STARTED, 1, unit="samples", world=1)
    for step, accuracy in ((2, 0.5), (4, 0.75)):
        append_line(
            paths.metrics, {"step": step, "attempt": 1, "loss": 1 / step, "tokens_per_s": 9.0, "time": 10.0 + step}
        )
        scores = {"accuracy": accuracy, "f1": accuracy / 2}
        write_event(paths.events, EventKind.EVALUATED, 1, step=step, set="held_out", loss=0.5, tokens=9, scores=scores)
    drawn = html.report_payload(read_run_history(paths))
    charts = {chart["id"]: chart for chart in drawn["charts"]}
    assert (charts["scores"]["title"], charts["scores"]["legend"]) == ("Scores", True)
    assert charts["speed"]["unit"] == "samples/s"
    assert [(one["name"], one["step"], one["loss"]) for one in drawn["scores"]] == [
        ("accuracy", [2, 4], [0.5, 0.75]), ("f1", [2, 4], [0.25, 0.375])
    ]  # fmt: skip
    text = html.write_report(paths).read_text()
    assert "accuracy 0.7500, f1 0.3750" in text
    assert "perplexity" not in text


def test_what_needs_language_says_so(tmp_path: Path) -> None:
    _, config = own_of(SOUND, tmp_path)
    with pytest.raises(ConfigError, match=r"reads its own data; there are no token files to prepare"):
        data._recipe_for_data(config)
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    resolved, _ = resolve.resolve_autos(config, device="cpu", world=1)
    run_folder.write_start(paths, resolved, None)
    append_line(paths.metrics, {"step": 1, "attempt": 1})
    with pytest.raises(ConfigError, match=r"which writes no text"), load_generator(paths.root, Sampling()):
        raise AssertionError("it was opened")
    with pytest.raises(CheckpointError, match=r"has no usable checkpoint to export"):
        export_run(paths, tmp_path / "out", None)
    with pytest.raises(ConfigError, match=r"--merge is for a run that trains adapters"):
        export_run(paths, tmp_path / "out", None, merge=True)


# ---------------------------------------------------------------------------------------------------------- IDX files


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


def write_mnist(folder: Path, images: int = 20, zipped: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    for part in ("train", "t10k"):
        for name, shape in (("images-idx3", (images, 8, 8)), ("labels-idx1", (images,))):
            high = 256 if len(shape) == 3 else 10
            raw = idx(generator.integers(0, high, shape).astype(np.uint8))
            path = folder / f"{part}-{name}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(raw, 1) if zipped else raw)


def vision(folder: Path) -> tuple[CustomWorkload, load.Config]:
    options = {"folder": str(folder), "width": 8, "depth": 1}
    tree = {"task": {"code": str(EXAMPLE), "options": options}, "train": {"global_batch": 8}}
    config = load.build_config(tree, "the test's recipe")
    return CustomWorkload(config), config


def test_images_are_read_zipped_or_not(tmp_path: Path) -> None:
    write_mnist(tmp_path / "plain")
    write_mnist(tmp_path / "zipped", zipped=True)
    found = []
    for name in ("plain", "zipped"):
        own, config = vision(tmp_path / name)
        check_custom_task(own, config)
        found.append(own.fingerprints())
    assert found[0] == found[1]


def test_images_of_an_older_torchvision_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "processed"
    folder.mkdir(parents=True)
    pictures = torch.arange(40, dtype=torch.uint8).view(10, 2, 2)
    for name in ("training", "test"):
        torch.save((pictures, torch.arange(10)), folder / f"{name}.pt", _use_new_zipfile_serialization=name == "test")
    for root, part in ((tmp_path, "train"), (folder.parent, "t10k"), (folder, "train")):
        images = load_mnist(root, part)
        assert len(images) == 10
        assert images[3][0].tolist() == [[12, 13], [14, 15]]
        assert images[3][1] == 3
    for content in (pictures, (pictures, Path("code")), (pictures.float(), torch.arange(10)), (pictures, 7)):
        torch.save(content, folder / "training.pt")
        with pytest.raises(DataError, match=r"training\.pt holds "):
            load_mnist(tmp_path, "train")
    torch.save((pictures, torch.arange(10)), folder / "training.pt")
    (folder / "training.pt").write_bytes((folder / "training.pt").read_bytes()[:300])
    with pytest.raises(DataError, match=r"training\.pt holds no pair"):
        load_mnist(tmp_path, "train")


DAMAGE = {
    "train-images-idx3-ubyte has 1000 bytes, but its header says (20, 8, 8)": lambda raw: raw[:1000],
    "train-images-idx3-ubyte is not an IDX file of bytes (it begins with 89504e47)": lambda raw: b"\x89PNG" + raw[4:],
    "train-images-idx3-ubyte is damaged": lambda raw: raw[:5],
    "images of shape (20, 64) and labels of (20,)": lambda raw: idx(np.zeros((20, 64), np.uint8)),
    "labels up to 9, but only 4 classes": None,
    "neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte.gz": None,
    "train-images-idx3-ubyte.gz is damaged": None,
}


@pytest.mark.parametrize("sentence", DAMAGE)
def test_a_damaged_file_is_named(sentence: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=".gz is" in sentence)
    path = tmp_path / "train-images-idx3-ubyte"
    spoil = DAMAGE[sentence]
    own, config = vision(tmp_path)
    if spoil is not None:
        path.write_bytes(spoil(path.read_bytes()))
    elif "neither" in sentence:
        (tmp_path / "train-labels-idx1-ubyte").unlink()
    elif "classes" in sentence:
        own = CustomWorkload(load.update_config(config, {"task.options": {**config.task.options, "classes": 4}}))
    else:
        zipped = path.with_name(f"{path.name}.gz")
        zipped.write_bytes(zipped.read_bytes()[:-300])
    with pytest.raises(DataError) as caught:
        check_custom_task(own, config)
    assert sentence in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_batch_needs_no_places_of_its_own() -> None:
    assert Batch({}, 0).samples.shape == (0,)
