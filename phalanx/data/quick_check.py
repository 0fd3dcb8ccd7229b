"""Mistakes in data that its first records show, found before a model is made or a text tokenised.

It reads the first records of the first files, whatever their size, and no tokenizer: seconds matter here, and what
these records do not show is found when they are encoded.
"""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.core.errors import ConfigError
from phalanx.data import chat, label_rows
from phalanx.data.prepare import list_requests, make_document_format
from phalanx.data.read_chunks import Meter, plan_chunks, read_records
from phalanx.data.source_file import SourceFile
from phalanx.data.sources import LINES, LIST, ROWS, Record, RecordFormat, check_format
from phalanx.storage import files as storage

if TYPE_CHECKING:
    from phalanx.config.schema import Config

CHECKED_FILES, CHECKED_RECORDS = 16, 8  # looked at: files of each source, and records of each
MOST_LIST_BYTES = 16 << 20  # of a JSON list, which is read as a whole


def check_first_records(config: "Config") -> None:
    """Raises DataError for a source that is not there or whose first records cannot be read as the recipe says, and
    ConfigError where conversations have no chat template. A task of the user's own reads its data itself."""
    if config.task.code is not None or config.data.format == "masked":
        return
    timeout_s = config.resilience.storage_timeout_s
    kind = config.task.kind if config.task.kind in label_rows.FORMATS else None
    format = (
        label_rows.make_labelled_format(config.data, kind, timeout_s)
        if kind
        else make_document_format(config.data, timeout_s)
    )
    train, validation = list_requests(config.data, timeout_s)
    for wanted in [*(wanted for wanted, _ in train), *validation.values()]:
        if kind is None:
            check_format(wanted.files, config.data.format)
        for file in wanted.files[:CHECKED_FILES]:
            for record in itertools.islice(_first(file, format, kind), CHECKED_RECORDS):
                if record is not None and format.format in ("chat", "prompt"):
                    chat.check_chat_record(record, format)
    if format.format == "chat":
        _check_template(config)


def _first(file: SourceFile, format: RecordFormat, kind: str | None) -> Iterator[Record | None]:
    """Its first records, or None for each that was read and has nothing else to be looked at."""
    if kind is not None:
        yield from (None for _ in label_rows.read_labelled_records(file, format, Meter()))
    elif file.kind in (LINES, ROWS) or (file.kind == LIST and file.size_bytes <= MOST_LIST_BYTES):
        for chunk in plan_chunks([file], format)[:1]:
            yield from read_records(chunk, format, Meter())


def _check_template(config: "Config") -> None:
    """Raises ConfigError where there is no chat template: none is named, and the tokenizer is here and has none."""
    if chat.load_template(config.data.chat_template) is not None:
        return
    name = config.data.tokenizer if config.data.tokenizer != "auto" else config.model.from_hf or "train"
    if name == "train":
        raise ConfigError(chat.describe_missing_template("a tokenizer that is trained", "chat"))
    folder = Path(name).expanduser()
    if storage.is_url(name) or not folder.is_dir():
        return  # looked at when it is opened
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    beside = any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json"))
    if not beside and not (isinstance(settings, dict) and settings.get("chat_template")):
        raise ConfigError(chat.describe_missing_template(f"the tokenizer in {folder}", "chat"))
