"""Datasets of the Hugging Face hub, or of a local folder in its layout, streamed by the `datasets` library."""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from phalanx.data.sources import HUB, REMOTE, SourceFile
from phalanx.errors import DataError

DEFAULT_SPLIT = "train"


def hub_file(source: str, key: str) -> SourceFile:
    """`hub:NAME[:CONFIG[:SPLIT]]` as one file of a source; its version is that of the dataset's files.

    Raises DataError for a dataset, configuration or split that is not there or cannot be reached.
    """
    name, config, split = _parts(source)
    builder = _builder(source, key)
    files = builder.config.data_files
    if files is not None and split not in files:
        raise DataError(
            f"{key} names {source}, but the dataset has no split {split} (it has: {', '.join(map(str, files))}); name "
            f"one as hub:NAME:CONFIG:SPLIT"
        )
    facts = [builder.hash, builder.config.name]
    size = 1
    if files is not None:
        origins = zip(files[split], files[split].origin_metadata, strict=True)
        facts += [[str(file), [str(fact) for fact in origin]] for file, origin in origins]
        size = sum(os.path.getsize(file) for file in files[split] if os.path.isfile(file)) or len(files[split])
    if os.path.isdir(name):
        name = os.path.abspath(name)
    path = HUB + ":".join([name, config or "", split])
    return SourceFile(path, REMOTE, size, json.dumps(facts))


def shards(source: str) -> int:
    """Into how many parts a dataset falls by itself."""
    return max(1, int(_stream(source).num_shards))


def shard_records(source: str, index: int, count: int) -> Iterator[dict[str, Any]]:
    """The records of shard `index` of `count`. Raises DataError when the stream breaks."""
    stream = _stream(source).shard(num_shards=count, index=index)
    rows = iter(stream)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # its readers raise whatever the file format's library raises
            raise DataError(
                f"{source} broke off in shard {index + 1} of {count} ({_reason(error)}); start again to go on there"
            ) from None
        if row is None:
            return
        yield row


def _parts(source: str) -> tuple[str, str | None, str]:
    name, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    return os.path.expanduser(name), config or None, split or DEFAULT_SPLIT


def _builder(source: str, key: str = "data.source") -> Any:
    import datasets

    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # they tell of each try
        logging.getLogger(library).setLevel(logging.ERROR)
    name, config, _ = _parts(source)
    try:
        return datasets.load_dataset_builder(name, config)
    except Exception as error:  # of the network, the hub, the dataset's own files: all of them are one sentence here
        raise DataError(
            f"{key} names {source}, which the datasets library cannot open ({_reason(error)}); correct the name "
            f"(hub:NAME:CONFIG:SPLIT), or look at the network"
        ) from None


def _stream(source: str) -> Any:
    builder = _builder(source)
    try:
        return builder.as_streaming_dataset(split=_parts(source)[2])
    except ValueError as error:
        raise DataError(f"{source} cannot be streamed ({_reason(error)}); name another split or dataset") from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
