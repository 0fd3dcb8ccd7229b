"""Whatever is wrong with what a user brings is one sentence that names it and the remedy, before training starts."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.placement import ExitCode
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.data.chat import TEMPLATES
from tests.dist.command import RECIPE, call, contents, phalanx, refused, sentence, write_place
from tests.helpers import ALL, run_ranks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a text, a recipe, a complete run of two steps and its export."""
    folder = write_place(tmp_path_factory.mktemp("place"))
    train = ["train", "recipe.yaml", "--run-dir", "done", "--ranks", "1"]
    results = run_ranks(call, 1, folder=str(folder), commands=[train, ["export", "done", "exported"]])[0]
    assert [result[0] for result in results] == [0, 0], results
    return folder


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working folder of one's own, with the text and the recipe."""
    return write_place(tmp_path)


# ------------------------------------------------------------------------------------------------------ data and shapes


def write_bad_files(folder: Path) -> None:
    (folder / "empty.txt").write_bytes(b"")
    (folder / "latin.txt").write_bytes(b"one\ntwo caf\xe9\n")
    (folder / "torn.jsonl").write_text('{"text": "one"}\n{"text": "tw\n')
    (folder / "other.jsonl").write_text('{"body": "one"}\n')
    (folder / "number.jsonl").write_text('{"text": 5}\n')
    (folder / "blank.jsonl").write_text('{"text": ""}\n')
    (folder / "bare").mkdir()
    (folder / "words").mkdir()
    (folder / "words" / "tokenizer.json").write_text("{}")
    (folder / "short.jsonl").write_text('{"text": "a"}\n')
    (folder / "talk.jsonl").write_text('{"messages": [{"role": "user", "content": "why?"}]}\n')


BAD_DATA = [
    ("data.source=gone.txt", r"data.source names gone.txt, but no such file exists; correct the path"),
    ("data.source=[text.jsonl, '*.nothing']", r"data.source names \*.nothing, but no such file exists"),
    ("data.source=empty.txt", r"data.source .*empty.txt.* has only empty files, so there is nothing to train on"),
    (
        "data.source=bare",
        r"data.source names the folder bare, in which no file has a known extension .* bare/\*\*/\*.log",
    ),
    ("data.source=latin.txt", r"latin.txt, line 2 is not UTF-8 \(byte 0xe9 at 11\); convert the file"),
    ("data.source=torn.jsonl", r"torn.jsonl, line 2 is not JSON .*; correct or delete the line"),
    ("data.text_key=''", r"text.jsonl, line 1 has no key '' \(it has: text\); set data.text_key"),
    ("data.validation={dev: short.jsonl}", r"data.validation dev has only \d+ tokens, less than one sequence of 8"),
    (
        "data={source: talk.jsonl, format: chat, chat_template: gone.jinja}",
        r"data.chat_template gone.jinja cannot be read \(No such file or directory\); give a Jinja file or one of c",
    ),
    ("data.tokenizer=gone", r"data.tokenizer is .*gone, which does not exist; give a local Hugging Face folder"),
    ("data.tokenizer=org/gone", r"hub cannot be reached for org/gone .*hf download org/gone --local-dir org/gone$"),
    ("data.tokenizer=bare", r"data.tokenizer is .*bare, which holds no tokenizer"),
    ("data.tokenizer=words", r"words/tokenizer.json cannot be read .*; restore the file"),
    ("model.vocab_size=100", r"the trained tokenizer has 280 tokens but the model's vocabulary only 100; lower data"),
    (
        "data.seq_len=9000",
        r"make 0 sequences of 9000 \(data\.seq_len\), fewer than one global batch of 4; add data, or shorten",
    ),
    ("model.heads=3", r"model.hidden is 16 and model.heads is 3"),
    ("model.kv_heads=4", r"recipe.yaml: model.heads is 2 and model.kv_heads is 4, so query heads cannot share .* set "),
    ("model.head_dim=3", r"model.head_dim is 3, but rotary positions turn pairs of channels; set an even one"),
    ("model.hidden=1099511627776", r"the shapes make .* more elements than a tensor can have; lower model.hidden"),
    (
        "model.hidden=1048576",
        r"the model does not fit: its parameters and optimizer state take .* GiB on each of 1 r",
    ),
    ("model.layers=100000000", r"model.layers must be at most 10000, not 100000000"),
    ("model.preset=llama-7", r"model.preset 'llama-7' is not known; did you mean llama-"),
]
# Of which tests/unit/test_{sources,prepare,loader,chat}.py have the sentences.
BAD_DATA += [
    ("data.source=blank.jsonl", r"data.source .*no document to train on"),
    ("data.source=other.jsonl", r"other.jsonl, line 1 has no key 'text' \(it has: body\); set data.text_key"),
    ("data.source=number.jsonl", r"number.jsonl, line 1 has a int under 'text' instead of text; set data.text_key"),
    (
        "data={source: [{path: text.jsonl}, {path: short.jsonl}], tokenizer_vocab: 280, seq_len: 8, held_out: 0}",
        r"make 0 sequences of 8 \(data\.seq_len\), so it cannot take its share of the mixture; add data",
    ),
    ("data={source: talk.jsonl, format: chat}", r"has no chat template, so data.format chat .* set data.chat_template"),
    (
        "data={source: talk.jsonl, format: chat, chat_template: chatml}",
        r"talk.jsonl, line 1 has no assistant turn, so it has nothing to learn",
    ),
    ("data.cache=text.jsonl", r"the data cache text.jsonl cannot be written .*; free space there or choose another"),
    ("train.global_batch=9000", r"sequences of 8, fewer than one global batch of 9000; add data, or lower train.glob"),
][: None if ALL else 0]


@pytest.fixture(scope="module")
def bad_data(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bad")
    write_bad_files(folder)
    write_place(folder)
    commands = [
        ["train", "recipe.yaml", "--run-dir", f"run-{number}", "--ranks", "1", override]
        for number, (override, _) in enumerate(BAD_DATA)
    ]
    results = run_ranks(call, 1, timeout_s=240, folder=str(folder), commands=commands)[0]
    left = [sorted(contents(folder / f"run-{number}")) for number in range(len(BAD_DATA))]
    return {override: (*result, files) for (override, _), result, files in zip(BAD_DATA, results, left, strict=True)}


@pytest.mark.parametrize(("override", "words"), BAD_DATA)
def test_bad_data_and_shapes(override: str, words: str, bad_data: dict[str, Any]) -> None:
    code, _, err, files = bad_data[override]
    if "has 2 problems" in err:  # two keys that do not go together may be two problems
        err = err.replace("\n  - ", "; ")
    assert re.search(words, sentence(code, err)), err
    assert files == []  # nothing was begun


def test_evaluations_that_have_nothing_to_read_are_refused(here: Path) -> None:
    (here / "one.txt").write_text("a single document, which is trained on " * 20)
    found = refused(here, "train", "recipe.yaml", "data.source=one.txt", "train.eval_every=1", "data.held_out=1e-9")
    assert "have no tokens: data.held_out 1e-09 chose no document of 1" in found
    assert found.endswith("raise it, or give a set in data.validation, or set train.eval_every=0")


def test_one_rank_that_is_asked_to_be_two(here: Path) -> None:
    found = refused(here, "train", "recipe.yaml", "--ranks", "2", "parallel.engine=single")
    assert found == "parallel.engine single trains on one rank, but there are 2; set parallel.engine=auto"


def test_a_model_that_fits_nowhere_is_refused_with_all_that_it_takes(here: Path) -> None:
    found = refused(here, "train", "recipe.yaml", "--ranks", "2", "model.hidden=65536")
    part = re.search(r"take (.+) GiB \((.+) if other ranks hold more\) on each of 2 ranks, and a rank has", found)
    assert part, found
    assert float(part[1]) > float(part[2]) > 0


# ------------------------------------------------------------------------------------------------- Hugging Face folders


def broken_copies(source: Path, folder: Path) -> None:
    """Hugging Face folders that each have one thing wrong."""
    config = json.loads((source / "config.json").read_text())
    weights = (source / "model.safetensors").read_bytes()
    changes: dict[str, dict[str, Any]] = {
        "mamba": {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "biased": {"attention_bias": "yes"},
        "wider": {"intermediate_size": 48},
        "deeper": {"num_hidden_layers": 2},
        "nameless": {"architectures": None, "model_type": None},
        "unscaled": {"hidden_size": None},
        "worded": {"hidden_size": "wide"},
        "short": {"max_position_embeddings": 4},
        "longrope": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    }
    for name in (*changes, "unweighted", "torn", "garbled", "mute", "list", "speechless", "cut"):
        shutil.copytree(source, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config | changes.get(name, {})))
    (folder / "unweighted" / "model.safetensors").unlink()
    (folder / "torn" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "cut" / "model.safetensors").write_bytes(b"")
    (folder / "garbled" / "config.json").write_text("{")
    (folder / "list" / "config.json").write_text("[]")
    (folder / "mute" / "config.json").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / "speechless" / name).unlink(missing_ok=True)


BAD_FOLDERS = [
    ("gone", r"gone/config.json cannot be read \(No such file or directory\).*; give a Hugging Face folder"),
    (
        "mamba",
        r"mamba has the architecture MambaForCausalLM, which .*; use a folder of a supported one: LlamaForCausalLM",
    ),
    ("nameless", r"nameless has the architecture None, .* supported one: LlamaForCausalLM"),
    ("biased", r"biased sets \"yes\" as attention_bias, which is neither true nor false; choose one"),
    ("longrope", r"longrope scales rotary positions by the rule 'longrope', which is not supported .*: default, l"),
    ("wider", r"model.safetensors holds \S+ of shape \(32, 16\), but config.json makes it \(48, 16\); use weights and"),
    ("deeper", r"deeper lacks model.layers.1.\S+, .* and \d more, which its config.json promises; fetch the folder's"),
    ("unscaled", r"unscaled does not set hidden_size, without which .*; give it a number"),
    ("worded", r'worded sets "wide" as hidden_size, .*; give it a number'),
    ("short", r"data.seq_len 8 is longer than the model's 4 positions; lower it, or"),
    ("unweighted", r"unweighted has no .safetensors file and no pytorch_model.bin, .*; fetch the folder's fi"),
    ("torn", r"torn/model.safetensors cannot be read as safetensors .*; fetch the file again"),
    ("cut", r"cut/model.safetensors cannot be read as safetensors .*; fetch the file again"),
    ("garbled", r"garbled/config.json is not valid JSON .*; fetch the file again"),
    ("list", r"list/config.json holds no JSON object, .*; fetch the file again"),
    ("mute", r"mute/config.json cannot be read .*; give a Hugging Face folder"),
    ("speechless", r"model.from_hf speechless has no tokenizer, .*; set data.tokenizer to the folder of its tokenizer"),
]


@pytest.fixture(scope="module")
def bad_folders(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("folders")
    broken_copies(place / "exported", folder)
    shutil.copy2(place / "text.jsonl", folder)
    (folder / "recipe.yaml").write_text(re.sub("model: .*", "", RECIPE))
    commands = [
        ["train", "recipe.yaml", "--run-dir", f"run-{name}", f"model.from_hf={name}"] for name, _ in BAD_FOLDERS
    ]
    results = run_ranks(call, 1, timeout_s=240, folder=str(folder), commands=commands)[0]
    left = [sorted(contents(folder / f"run-{name}")) for name, _ in BAD_FOLDERS]
    return {name: (*result, files) for (name, _), result, files in zip(BAD_FOLDERS, results, left, strict=True)}


@pytest.mark.parametrize(("name", "words"), BAD_FOLDERS)
def test_a_bad_hugging_face_folder(name: str, words: str, bad_folders: dict[str, Any]) -> None:
    code, _, err, files = bad_folders[name]
    assert re.search(words, sentence(code, err)), err
    assert files == []


# ---------------------------------------------------------------------------------------------------------- run folders


def test_a_run_folder_that_cannot_be_written(here: Path) -> None:
    found = refused(here, "train", "recipe.yaml", "--run-dir", "text.jsonl/run")
    assert found == ("the run folder text.jsonl/run cannot be written (Not a directory); choose another with --run-dir")
    found = refused(here, "train", "recipe.yaml", "--run-dir", "text.jsonl")
    assert "the run folder text.jsonl cannot be written (File exists)" in found


def test_a_run_folder_without_permission(here: Path) -> None:
    """Permission bits do not bind root, but nobody makes a folder in /proc."""
    found = refused(here, "train", "recipe.yaml", "--run-dir", "/proc/phalanx-run")
    assert found.startswith("the run folder /proc/phalanx-run cannot be written (")
    assert found.endswith("choose another with --run-dir")


def test_a_run_folder_in_use_names_the_process(here: Path) -> None:
    (here / "run").mkdir()
    with open(here / "run" / ".lock", "w+") as lock:
        lock.write(f"{os.getpid()} on this machine\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = refused(here, "train", "recipe.yaml", "--run-dir", "run")
    assert found == (
        f"the run folder run is in use by process {os.getpid()} on this machine; wait for it, stop it, "
        "or choose another --run-dir"
    )
    assert contents(here / "run") == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optim.lr=1"],
            "has a run of another configuration: optim.lr is 1.0 now and was 0.0003. Restore these values",
        ),
        (["model.hidden=32", "train.seed=9"], "model.hidden is 32 now and was 16; train.seed is 9 now and was 0."),
        (["data.seq_len=4"], "data.seq_len is 4 now and was 8"),
    ],
)
def test_a_run_folder_of_another_configuration_is_left_alone(place: Path, overrides: list[str], words: str) -> None:
    before = contents(place / "done")
    found = refused(place, "train", "recipe.yaml", "--run-dir", "done", "train.steps=9", *overrides)
    assert words in found
    assert found.endswith("choose another --run-dir")
    assert contents(place / "done") == before


def test_a_complete_run_says_so_and_goes_on_when_asked_for_more(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    command = ("train", "recipe.yaml", "--run-dir", "done", "--ranks", "1")
    before = contents(tmp_path / "done")
    code, out, err = phalanx(tmp_path, *command)
    assert (code, err) == (0, "")
    assert "this run is complete at step 2; raise train.steps to continue, or choose another --run-dir" in " ".join(
        out.split()
    )
    assert contents(tmp_path / "done") == before
    assert phalanx(tmp_path, *command, "train.steps=5")[0] == 0
    paths = RunPaths(tmp_path / "done")
    assert [step["step"] for step in read_steps(paths.metrics)] == [1, 2, 3, 4, 5]
    assert [step["attempt"] for step in read_steps(paths.metrics)] == [1, 1, 2, 2, 2]
    assert [e["step"] for e in read_lines(paths.events) if e["kind"] == EventKind.RESUMED] == [2]
    lr = [step["lr"] for step in read_steps(paths.metrics)]
    assert lr == sorted(lr, reverse=True)  # the decay still ends where the first start said


@pytest.mark.parametrize("damage", ["config", "events"])
def test_a_damaged_run_folder(place: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    paths = RunPaths(tmp_path / "done")
    command = ("train", "recipe.yaml", "--run-dir", "done", "--ranks", "1", "train.steps=3")
    if damage == "config":
        paths.config.write_text("train: [")
        assert "done/config.yaml, the run's configuration, is damaged" in refused(tmp_path, *command)
        paths.config.unlink()
        found = refused(tmp_path, *command)
        assert found == (
            "the run folder done has checkpoints but no config.yaml, so the run they belong to is unknown; restore "
            "that file or choose another --run-dir"
        )
    else:
        paths.events.write_text('{"kind": "finished"}\n{"attempt": "x", "kind": "finished", "step": null}\n{"torn')
        assert phalanx(tmp_path, *command)[0] == 0
        assert read_steps(paths.metrics)[-1]["step"] == 3


# ---------------------------------------------------------------------------------------------- what comes out of a run


@pytest.fixture
def kept(place: Path) -> Iterator[Path]:
    """The working folder, in which the run must be the same afterwards."""
    before = contents(place / "done"), contents(place / "exported")
    yield place
    assert (contents(place / "done"), contents(place / "exported")) == before


def test_export(kept: Path) -> None:
    assert "exported exists and is not empty, so an export would mix with what is there; name a new folder" in refused(
        kept, "export", "done", "exported"
    )
    assert "exists and is not empty" in refused(kept, "export", "done", "recipe.yaml")
    assert "text.jsonl/new cannot be written" in refused(kept, "export", "done", "text.jsonl/new")
    assert refused(kept, "export", "nowhere", "new") == (
        "nowhere holds no run (it has no config.yaml); name a run folder"
    )
    assert "recipe.yaml holds no run" in refused(kept, "export", "recipe.yaml", "new")
    assert refused(kept, "export", "done", "new", "--dtype", "fp8") == (
        "--dtype fp8 is not known; choose one of bf16, fp16, fp32, fp64"
    )
    assert not (kept / "new").exists()


def test_export_of_a_run_without_a_checkpoint(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "done", tmp_path / "done")
    shutil.rmtree(tmp_path / "done" / "checkpoints")
    found = refused(tmp_path, "export", "done", "new", code=ExitCode.FAILED)
    assert found == "done has no usable checkpoint to export; train it first"


def test_export_of_a_run_whose_first_weights_are_gone(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    (tmp_path / "recipe.yaml").write_text(re.sub("model: .*", "model: {from_hf: exported}", RECIPE))
    assert phalanx(tmp_path, "train", "recipe.yaml", "--run-dir", "tuned", "train.steps=0")[0] == 0
    shutil.rmtree(tmp_path / "exported")
    found = refused(tmp_path, "export", "tuned", "new")
    assert found == (
        "model.from_hf exported is gone, so the dtype of its weights is unknown; choose one with --dtype "
        "bf16|fp16|fp32|fp64"
    )
    assert phalanx(tmp_path, "export", "tuned", "new", "--dtype", "bf16")[0] == 0


def test_what_a_run_was_tuned_with_stays_with_it(place: Path, tmp_path: Path) -> None:
    """Its chat template's file may go; and an export of adapters is called what it is."""
    shutil.copytree(place / "exported", tmp_path / "exported")
    talk = {"messages": [{"role": "user", "content": "some words"}, {"role": "assistant", "content": "and more"}]}
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps(talk)}\n" * 9)
    (tmp_path / "own.jinja").write_text(TEMPLATES["chatml"])
    (tmp_path / "recipe.yaml").write_text(re.sub("model: .*", "model: {from_hf: exported, lora: {rank: 2}}", RECIPE))
    data = "data={source: talk.jsonl, format: chat, chat_template: own.jinja, seq_len: 8, cache: cache}"
    assert phalanx(tmp_path, "train", "recipe.yaml", data, "--run-dir", "tuned", "train.steps=0")[0] == 0
    (tmp_path / "own.jinja").unlink()
    spoken = ["--chat", "--prompt", "some words", "--max-tokens", "3"]
    commands = [["export", "tuned", "adapter"], ["export", "tuned", "merged", "--merge"]]
    commands += [["generate", model, *spoken] for model in ("tuned", "adapter", "merged")]
    adapter, merged, *answers = run_ranks(call, 1, timeout_s=240, folder=str(tmp_path), commands=commands)[0]
    assert adapter[1].endswith("step 0 of tuned is now the PEFT adapter folder adapter\n")
    assert merged[1].endswith("step 0 of tuned is now the Hugging Face folder merged\n")
    assert answers[0][0] == 0
    assert answers[0] == answers[1] == answers[2]


def test_report(kept: Path) -> None:
    (kept / "bare").mkdir()
    for name in ("bare", "nowhere", "recipe.yaml"):
        assert refused(kept, "report", name) == (
            f"{name} has neither metrics.jsonl nor events.jsonl; give the folder of a run"
        )
    assert contents(kept / "bare") == {}


def test_generate(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "exported", tmp_path / "torn")
    weights = (tmp_path / "torn" / "model.safetensors").read_bytes()
    (tmp_path / "torn" / "model.safetensors").write_bytes(weights[:100])
    (tmp_path / "unnamed").mkdir()
    (tmp_path / "unnamed" / "config.json").write_text("{}")
    wrong = [str(kept / "nowhere"), str(kept / "recipe.yaml"), str(kept / "cache"), "torn", "unnamed"]
    commands = [["generate", name] for name in wrong]
    commands += [["generate", str(kept / "exported"), "--prompt", ""]]
    commands += [["generate", str(kept / "done"), "--prompt", "hello", "--max-tokens", "3", "--seed", "4"]] * 2
    results = run_ranks(call, 1, timeout_s=240, folder=str(tmp_path), commands=commands)[0]
    said = [sentence(code, err) for code, _, err in results[:6]]
    for name, found in zip(wrong[:3], said, strict=False):
        assert found == (
            f"{name} is neither a run folder nor a Hugging Face folder nor an adapter's; name one that holds a model"
        )
    for name, found in zip(wrong[3:], said[3:], strict=False):
        assert f"transformers cannot load a model and its tokenizer from {name} (" in found
        assert found.endswith("fetch the folder's files again or name another")
    assert said[5] == "the prompt has no tokens; give some text with --prompt"
    assert [code for code, _, _ in results[6:]] == [0, 0]
    assert results[6][1].startswith("hello")
    assert results[6][1] == results[7][1]


def test_data_commands(here: Path) -> None:
    """Preparing sources and recipes, looking at what came of it, and writing it for Megatron."""
    assert "data.source names gone, but no such file exists" in refused(here, "data", "prepare", "gone")
    assert "data.source has an empty entry" in refused(here, "data", "prepare", "")
    assert "has a character that is not text" in refused(here, "data", "prepare", "caf\udce9.txt")
    found = refused(here, "data", "prepare", "text.jsonl", "--cache", "text.jsonl")
    assert "the data cache text.jsonl cannot be written" in found
    command = ("data", "prepare", "text.jsonl", "--cache", "cache", "--vocab", "280", "--tokenizer", "auto")
    code, out, _ = phalanx(here, *command)
    assert code == 0
    line = r": [\d,]+ tokens in [\d,]+ documents, vocabulary 280, in (.*cache/\w+)"
    made = re.search(rf"train{line}/train\nheld_out{line}/held_out\n", out)
    assert made is not None
    code, out, _ = phalanx(here, "data", "inspect", made[1], "--samples", "1")
    assert code == 0
    assert all(word in out for word in ("documents", "vocabulary used", "train, document ", "<|endoftext|>"))
    assert phalanx(here, "data", "megatron", f"{made[1]}/train", "m")[0] == 0
    assert (here / "m.idx").read_bytes().startswith(b"MMIDIDX")
    assert "m.bin exists; choose another prefix" in refused(here, "data", "megatron", f"{made[1]}/train", "m")
    found = refused(here, "data", "prepare", "recipe.yaml", "--vocab", "300")
    assert found.startswith("a recipe has its own settings; write data.tokenizer_vocab=300 after it")
    found = refused(here, "data", "prepare", "text.jsonl", "recipe.yaml")
    assert found.startswith("recipe.yaml is a recipe after a source; give the recipe alone")
    found = refused(here, "data", "inspect", "memory://user:secret@place/sets")
    assert found.startswith("memory://place/sets is a URL; give a folder")
    code, out, _ = phalanx(here, "data", "prepare", "recipe.yaml", "data.validation={dev: text.jsonl}")
    assert code == 0
    assert [text.partition(":")[0] for text in out.splitlines()[-3:]] == ["train", "held_out", "dev"]
    before = sorted(here.rglob("cache/*"))
    code, out, _ = phalanx(here, "data", "inspect", "recipe.yaml", "--samples", "0")
    assert code == 0
    assert "held_out" in out
    assert sorted(here.rglob("cache/*")) == before
    assert "neither a token set nor a recipe" in refused(here, "data", "inspect", "cache")
    found = refused(here, "data", "inspect", made[1], "--tokenizer", "gone")
    assert found.startswith("data.tokenizer is gone, which does not exist; give a local Hugging Face folder")
    assert "optim.lr=1 is for a recipe, but" in refused(here, "data", "inspect", made[1], "optim.lr=1")


def test_what_one_rank_does_not_read_is_said_at_the_start(here: Path) -> None:
    code, out, err = phalanx(here, "train", "recipe.yaml", "--ranks", "1", "parallel.engine=single", "parallel.zero=2")
    assert code == 0, err
    assert "parallel.zero has no effect with parallel.engine single" in " ".join(out.split())
