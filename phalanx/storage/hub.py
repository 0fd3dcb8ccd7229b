"""Models of the Hugging Face hub by name: downloaded into huggingface_hub's cache, and pushed.

The library resumes interrupted downloads. It takes the token, the cache and the address from its usual settings: `hf
auth login` or HF_TOKEN, HF_HOME, HF_ENDPOINT.
"""

import contextlib
import fnmatch
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError, StorageError

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
TIMEOUT_S = 30.0  # of a request; the library limits how long a download may stall
# Files of a model's folder that are read. Weights: the first pattern with a match, as several hold the same.
_PLAIN = re.compile(r"[^/]+\.(?:json|model|jinja|txt)")
_WEIGHTS = ("model*.safetensors", "adapter_model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin")


def is_hub_name(text: str) -> bool:
    """Whether a text is a name `organization/name` or `organization/name@revision` of the hub: there is no local
    file of that name, nor a folder `organization` with other contents than models."""
    if not _NAME.fullmatch(text) or Path(text).exists():
        return False
    parent = Path(text.partition("@")[0]).parent
    return not parent.exists() or any(parent.glob("*/config.json"))


def split_hub_name(name: str) -> tuple[str, str | None]:
    """Split `organization/name@revision`; the revision may be None. Raises ConfigError for an invalid name."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"{name} is not a valid name on the Hugging Face hub; write organization/name, or with @revision"
        )
    return found[1], found[2]


def pin_commit(name: str, link: Path) -> str:
    """`organization/name@COMMIT` of a snapshot from `fetch_snapshot`: a branch may move, a commit does not. The
    name itself if the cache does not have the commit."""
    commit = link.resolve().name
    return f"{split_hub_name(name)[0]}@{commit}" if _COMMIT.fullmatch(commit) else name


def download_command(name: str) -> str:
    """Command that downloads a model to the folder of its name, on a machine with a network."""
    repository, revision = split_hub_name(name)
    return f"hf download {repository}{f' --revision {revision}' if revision else ''} --local-dir {repository}"


def fetch_snapshot(name: str, link: Path, weights: bool) -> Path:
    """Download the needed files of a model, optionally without weights, into huggingface_hub's cache, and make `link`
    point to them; if the hub cannot be reached, use the cached files. The caller holds a lock.

    Raises ConfigError for an unknown name or revision, without access or network, and for a repository without a model;
    StorageError for a broken download.
    """
    from huggingface_hub import HfApi, snapshot_download

    repository, revision = split_hub_name(name)
    try:
        listed = HfApi().model_info(repository, revision=revision, timeout=TIMEOUT_S).siblings or []
    except Exception as error:  # connection errors may come from any library underneath
        found = _find_cached(repository, revision, link, weights) if _is_unreachable(error) else None
        if found is None:
            raise _explain(error, name, f"; where there is a network: {download_command(name)}") from None
    else:
        wanted = choose_files([each.rfilename for each in listed], weights)
        if not wanted:
            raise ConfigError(f"{name} on the Hugging Face hub has no model files; correct the name")
        try:
            with _quiet_bars():
                found = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
        except Exception as error:
            raise _explain(error, name, "; restart, complete files are kept") from None
    if link.resolve() != found.resolve():
        temporary = link.with_name(f".{link.name}.new")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(found.resolve(), target_is_directory=True)
        os.replace(temporary, link)
    return link


def _find_cached(repository: str, revision: str | None, link: Path, weights: bool) -> Path | None:
    """The snapshot's folder in the cache, if it is complete, with `weights` if required."""
    from huggingface_hub import snapshot_download

    found = link if link.is_dir() else None
    with contextlib.suppress(OSError):  # not cached
        found = found or Path(
            snapshot_download(repository, revision=revision, allow_patterns="config.json", local_files_only=True)
        )
    there = [path.name for path in found.iterdir()] if found is not None else []
    return None if weights and choose_files(there, True) == choose_files(there, False) else found


def choose_files(names: list[str], weights: bool) -> list[str]:
    """Select the files of a model's repository that are read: weights in one format only."""
    wanted = [name for name in names if _PLAIN.fullmatch(name)]
    if not weights:
        return wanted
    plain = [name for name in names if "/" not in name]
    kinds = (fnmatch.filter(plain, pattern) for pattern in _WEIGHTS)
    return wanted + next((found for found in kinds if found), [])


def prepare_push(name: str, folder: object) -> None:
    """Check before the export that `folder` can be pushed to `organization/name` or `organization/name@branch`; a
    missing repository is created, private. Raises ConfigError for a folder at a URL, and without a token or write
    access."""
    from huggingface_hub import HfApi, get_token

    repository, branch = split_hub_name(name)
    if not isinstance(folder, Path):
        raise ConfigError(f"{folder} is a URL, which cannot be pushed to {name}; export to a folder")
    if get_token() is None:
        raise ConfigError(
            f"pushing to {name} needs a token for the Hugging Face hub; run `hf auth login`, or set HF_TOKEN to one "
            "with write access"
        )
    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        if branch is not None:
            HfApi().create_branch(repository, branch=branch, exist_ok=True)
    except Exception as error:
        raise _explain(error, name, ", so nothing was written or pushed; try again") from None


def push_folder(folder: Path, name: str, message: str) -> str:
    """Upload a folder as one commit, and return its address. Raises as `prepare_push` does, and StorageError."""
    from huggingface_hub import HfApi

    repository, branch = split_hub_name(name)
    try:
        with _quiet_bars():
            done = HfApi().upload_folder(
                repo_id=repository, folder_path=str(folder), revision=branch, commit_message=message
            )
    except Exception as error:
        again = f"hf upload {repository} {folder}{f' --revision {branch}' if branch else ''}"
        raise _explain(error, name, f", so {folder} was not pushed; try again: {again}") from None
    return str(done.commit_url)


def _status(error: Exception) -> int | None:
    """HTTP status of the hub's answer, or None."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_unreachable(error: Exception) -> bool:
    status = _status(error)
    return status >= 500 if status is not None else not isinstance(error, ValueError)  # an invalid name


def _explain(error: Exception, name: str, remedy: str) -> PhalanxError:
    """Convert the library's error to a sentence; `remedy` applies if the hub cannot be reached or the connection
    breaks."""
    from huggingface_hub import errors

    repository, revision = split_hub_name(name)
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{name} is gated on the Hugging Face hub; request access on its page, and log in with `hf auth login` "
            "or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{repository} is on the Hugging Face hub, but has no revision {revision}; give a branch, a tag or a "
            "full commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{name} is neither a folder here nor a model of the Hugging Face hub that this account may read; correct "
            "the name, or for a private model log in with `hf auth login`"
        )
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{name} is not a valid name on the Hugging Face hub ({_shorten(error)}); correct it")
    if _status(error) in (401, 403):
        return ConfigError(
            f"the Hugging Face hub refuses this account at {name} ({_status(error)}); log in with `hf auth login`, "
            "or set HF_TOKEN to a token with access"
        )
    if isinstance(error, OSError) and error.errno is not None:  # an error of the local disk
        return StorageError(
            f"{name} could not be downloaded ({_shorten(error)}); free space, or set HF_HOME to a folder with space"
        )
    kind = ConfigError if _status(error) is None else StorageError
    return kind(f"the Hugging Face hub cannot be reached for {name} ({_shorten(error)}){remedy}")


@contextlib.contextmanager
def _quiet_bars() -> Iterator[None]:
    """Hide the library's progress bars when output is not a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _shorten(error: Any) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
