"""Datasets of the Hugging Face hub, or of a local folder in its layout, streamed by the `datasets` library."""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from phalanx.core.errors import DataError
from phalanx.data.source_file import HUB, REMOTE, SourceFile

DEFAULT_SPLIT = "train"


def resolve_hub_source(source: str, key: str) -> SourceFile:
    """`hub:NAME[:CONFIG[:SPLIT]]` as one file of a source; its version is that of the dataset's files.

    Raises DataError for a dataset, configuration or split that is not there or cannot be reached.
    """
    name, config, split = _parts(source)
    if (saved := _saved(source)) is not None:
        return _saved_file(source, saved, key)
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


def read_hub_label_names(source: str, key: str) -> list[str] | None:
    """What the numbers of a column stand for, where the dataset says so."""
    feature = (_features(source) or {}).get(key)
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else [str(name) for name in names]


def _features(source: str) -> Any:
    if (saved := _saved(source)) is not None:
        import datasets

        return datasets.load_from_disk(saved).features
    _stream(source)  # only then a folder of files has been looked into
    return _stream(source).features


def _saved(source: str) -> str | None:
    """The folder of a local dataset, or of its split, that was written by its save_to_disk."""
    name, _, split = _parts(source)
    if os.path.isfile(os.path.join(name, "dataset_dict.json")):
        return os.path.join(os.path.abspath(name), split)
    return os.path.abspath(name) if os.path.isfile(os.path.join(name, "state.json")) else None


def _saved_file(source: str, folder: str, key: str) -> SourceFile:
    try:
        with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
            names = [one["filename"] for one in json.load(file)["_data_files"]]
        facts = [[name, os.stat(os.path.join(folder, name)).st_mtime_ns] for name in names]
        size = sum(os.path.getsize(os.path.join(folder, name)) for name in names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{key} names {source}, but {folder} is no whole dataset of the datasets library ({_reason(error)}); name "
            f"another split as hub:FOLDER::SPLIT, or save it again"
        ) from None
    name, config, split = _parts(source)
    return SourceFile(HUB + ":".join([os.path.abspath(name), config or "", split]), REMOTE, size, json.dumps(facts))


def count_shards(source: str) -> int:
    """Into how many parts a dataset falls by itself."""
    return max(1, int(_stream(source).num_shards))


def read_shard(source: str, index: int, count: int) -> Iterator[dict[str, Any]]:
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
    if (saved := _saved(source)) is not None:
        import datasets

        try:
            return datasets.load_from_disk(saved).to_iterable_dataset()
        except Exception as error:  # of its readers, as below
            raise DataError(f"{source} cannot be read ({_reason(error)}); save the dataset again") from None
    builder = _builder(source)
    try:
        return builder.as_streaming_dataset(split=_parts(source)[2])
    except ValueError as error:
        raise DataError(f"{source} cannot be streamed ({_reason(error)}); name another split or dataset") from None


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
