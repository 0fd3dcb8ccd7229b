"""Folders of checkpoints: how many of them are kept."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

from phalanx.compat.sagemaker.s3 import format_s3_path, is_s3_uri
from phalanx.storage import files as storage

logger = logging.getLogger("phalanx.sagemaker")

# Marks of that library in the checkpoints of its version 1.
SMP_IS_PARTIAL_KEY = "smp_is_partial"
SMP_IS_LOAD_INFO_KEY = "smp_is_load_info"


def last_number(name: str) -> int:
    """The last whole number in a folder's name, -1 where there is none: sorts by step."""
    found = re.findall(r"\d+", os.path.basename(name))
    return int(found[-1]) if found else -1


def limit_num_subdirs(
    root: str | os.PathLike[str],
    max_to_keep: int,
    sort_fn: Callable[[str], Any] = last_number,
    regex: str | None = None,
    log: bool = True,
) -> list[str]:
    """Remove the first of the folders below `root`, which may be an `s3://` URL, whose names match `regex`, in the
    order of `sort_fn`, so that `max_to_keep` are left; 0 or less keeps all. Only where `log`, which one rank should
    say. Gives those removed."""
    if not log or max_to_keep <= 0:
        return []
    root = format_s3_path(root)
    matching = sorted((name for name in _folders(root) if regex is None or re.match(regex, name)), key=sort_fn)
    removed = [os.path.join(root, name) for name in matching[: max(0, len(matching) - max_to_keep)]]
    for folder in removed:
        logger.info("removing %s", folder)
        if is_s3_uri(folder):
            storage.remove(one.url for one in storage.list_folder(folder, recursive=True))
        else:
            shutil.rmtree(folder)
    return removed


def _folders(root: str) -> list[str]:
    if is_s3_uri(root):
        return [one.name for one in storage.list_folder(root) if one.folder]
    return [name for name in os.listdir(root) if os.path.isdir(os.path.join(root, name))] if os.path.isdir(root) else []
