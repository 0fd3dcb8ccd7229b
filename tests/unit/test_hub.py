"""Models by name on the Hugging Face hub: fetched, cut off and resumed, refused, pushed."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from phalanx.core.errors import ConfigError, StorageError
from phalanx.core.placement import Placement
from phalanx.storage import hub as hub_names
from phalanx.storage.local_copies import fetch_folder, local_copy_path
from tests.dist import command
from tests.helpers import run_ranks
from tests.hub import MANY, TOKEN, Hub

NAME = "org/tiny-llama"


def find_constants(address: str, home: str) -> dict[str, Any]:
    """What HF_ENDPOINT and HF_HOME become where they are set before huggingface_hub is imported."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    return {
        "ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": f"{home}/hf", "HF_TOKEN_PATH": f"{home}/no-token",
    }  # fmt: skip


def call_at(placement: Placement, folder: str, words: list[str], address: str) -> list[Any]:
    """The command of a user who is logged in."""
    for name, value in find_constants(address, folder).items():
        setattr(huggingface_hub.constants, name, value)
    return command.call(placement, folder, [words], environment={"HF_TOKEN": TOKEN})[0]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, of weights in two formats and more that nobody reads."""
    served = Hub()
    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    served.add(NAME, tmp_path / "model")
    served.models[NAME] |= {
        "pytorch_model.bin": b"old", "consolidated.safetensors": b"twice", "original/params.json": b"{}",
        "README.md": b"# Tiny", "tokenizer.model": b"x",
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, value in find_constants(served.address, str(tmp_path)).items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    yield served
    served.close()


def fetch(name: str, tmp_path: Path, weights: bool = True) -> Path:
    return fetch_folder(name, str(tmp_path / "cache"), weights=weights)


def test_only_what_is_read_is_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    shapes = fetch(NAME, tmp_path, weights=False)
    assert not (shapes / "model.safetensors").exists()
    folder = fetch(NAME, tmp_path)
    assert folder == local_copy_path(NAME, str(tmp_path / "cache"))
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.model"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert (folder / "model.safetensors").read_bytes() == hub.models[NAME]["model.safetensors"]
    fetched = [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]
    assert len(fetched) == len(wanted)
    commit = fetch(f"{NAME}@{hub.commit(NAME)}", tmp_path)
    assert commit.resolve() == folder.resolve() and commit != folder
    hub.models[NAME]["config.json"] = b"{} "  # another commit of the branch, while the old one stays what it was
    assert (fetch(NAME, tmp_path) / "config.json").read_bytes() == b"{} "
    assert (commit / "config.json").read_bytes() != b"{} "


def test_without_a_network_what_is_there_is_taken(hub: Hub, tmp_path: Path) -> None:
    folder = fetch(NAME, tmp_path, weights=False).resolve()
    hub.down = True
    assert fetch(NAME, tmp_path, weights=False).resolve() == folder
    assert fetch_folder(NAME, str(tmp_path / "other"), weights=False).resolve() == folder  # huggingface_hub's own cache
    with pytest.raises(StorageError, match=f"cannot be reached for {NAME} .*hf download {NAME} --local-dir {NAME}$"):
        fetch(NAME, tmp_path)


def test_a_download_that_was_cut_off_is_resumed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # between tries
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", MANY // 4)  # what is kept at least
    data = os.urandom(3 * MANY)
    hub.models[NAME]["model.safetensors"] = data
    hub.breaks = 100
    with pytest.raises((ConfigError, StorageError), match=f"reached for {NAME} .*restart, complete files are kept"):
        fetch(NAME, tmp_path)
    hub.breaks, hub.asked = 1, []
    assert (fetch(NAME, tmp_path) / "model.safetensors").read_bytes() == data
    read = [
        (path.rpartition("/")[2], span) for method, path, span in hub.asked if method == "GET" and "resolve" in path
    ]
    assert read == [("model.safetensors", ""), ("model.safetensors", f"bytes={MANY}-")]


def test_one_process_fetches_while_the_others_wait(hub: Hub, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(fetch(NAME, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and all((path / "model.safetensors").is_file() for path in found)
    assert len([path for method, path, _ in hub.asked if method == "GET" and "model.safetensors" in path]) == 1


def test_what_the_hub_refuses_is_one_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(name: str) -> str:
        with pytest.raises((ConfigError, StorageError)) as caught:
            fetch(name, tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "is neither a folder here nor a model" in refusal("org/gone")
    assert f"{NAME} is on the Hugging Face hub, but has no revision v2; give a" in refusal(f"{NAME}@v2")
    assert "is not a valid name on the Hugging Face hub" in refusal("org/no--name")
    hub.models["org/empty"] = {"README.md": b""}
    assert "has no model files" in refusal("org/empty")
    hub.gated.add(NAME)
    assert f"{NAME} is gated on the Hugging Face hub; request access on its page" in refusal(NAME)
    hub.gated.clear()
    hub.closed.add(NAME)
    assert "for a private model log in with `hf auth login`" in refusal(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetch(NAME, tmp_path) / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="is not a valid name on the Hugging Face hub; write organization/name"):
        hub_names.split_hub_name("name")


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for other in ("model", "/org/model", "a/b/c", "runs/gone", "../org/model", "runs", "~/model", "hf://org/model"):
        assert not hub_names.is_hub_name(other), other
    (tmp_path / "org" / "first").mkdir(parents=True)
    (tmp_path / "org" / "first" / "config.json").touch()
    assert hub_names.is_hub_name("org/second") and not hub_names.is_hub_name("org/first")
    assert hub_names.is_hub_name("org/first@refs/pr/1")
    command = "hf download org/a-model.v1 --revision v2 --local-dir org/a-model.v1"
    assert hub_names.download_command("org/a-model.v1@v2") == command


def test_a_push_needs_a_token_and_a_folder_and_makes_a_private_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"pushing to org/new needs a token.*hf auth login"):
        hub_names.prepare_push("org/new", folder)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"refuses this account at org/new \(401\)"):
        hub_names.prepare_push("org/new", folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="s3://x is a URL, which cannot be pushed"):
        hub_names.prepare_push("org/new", "s3://x")
    hub_names.prepare_push("org/new", folder)
    assert hub.made[-1]["name"] == "new" and hub.made[-1]["visibility"] == "private"
    assert hub_names.push_folder(folder, "org/new", "Step 2").endswith("/org/new/commit/1")
    assert hub.pushed["org/new@main"] == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_begins_with_a_name_and_its_export_is_pushed(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some words to learn from " * 200)
    hub.models[NAME].pop("tokenizer.model")

    def phalanx(*words: str) -> str:
        ((code, out, err),) = run_ranks(call_at, 1, folder=str(tmp_path), words=words, address=hub.address)
        assert code == 0, err
        return str(out)

    keys = [f"model.from_hf={NAME}@main", "data.source=text.txt", "data.tokenizer=train", "data.tokenizer_vocab=270"]
    keys += [
        "data.seq_len=8",
        "data.held_out=0",
        "train.steps=1",
        "train.global_batch=2",
        f"data.cache={tmp_path / 'cache'}",
    ]
    (tmp_path / "recipe.yaml").write_text("train: {eval_every: 0}\n")
    phalanx("train", "recipe.yaml", *keys, "--run-dir", "run", "--ranks", "1")
    exact = f"{NAME}@{hub.commit(NAME)}"
    assert f"from_hf: {exact}" in (tmp_path / "run" / "config.yaml").read_text()
    before, config = len(hub.asked), hub.models[NAME]["config.json"]
    hub.models[NAME]["config.json"] += b" "  # the branch moves; the run stays with its commit
    assert hub.commit(NAME) not in exact
    hub.down = True
    phalanx("train", "recipe.yaml", *keys, "train.steps=2", "--run-dir", "run", "--ranks", "1")
    assert f"from_hf: {exact}" in (tmp_path / "run" / "config.yaml").read_text()
    assert len(hub.asked) > before
    hub.down, hub.models[NAME]["config.json"] = False, config
    assert f"pushed as {hub.address}/org/new/commit/1" in phalanx("export", "run", "out", "--push", "org/new")
    assert json.loads(hub.pushed["org/new@main"]["config.json"])["torch_dtype"] == "bfloat16"
    assert hub.pushed["org/new@main"]["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
