"""One chunk of a source to token ids, in pieces on disk: what a worker process does, and the process itself.

A piece is an `.npz` with the ids, lengths and perhaps masks of training and held-out documents, and then, once that is
safe on the disk, a `.json` that says how many documents of the chunk lie before the next piece. A chunk is done when
its own `.json` says so.
"""

import hashlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, PhalanxError
from phalanx.core.run_paths import redact_url
from phalanx.data import megatron_dataset
from phalanx.data.read_chunks import Chunk, Meter, count_lines_before, read_records
from phalanx.data.sources import LINES, TOKENS, Record, RecordFormat, is_held_out, record_digest
from phalanx.data.token_files import token_dtype, write_and_sync
from phalanx.data.tokenizer import Tokenizer, encode_documents, load_tokenizer

PIECE_CHARS = 8 << 20  # text of one piece
GROUP_CHARS = 1 << 20  # text handed to the tokenizer at once where each process has one core: more memory, no speed
PIECE_RECORDS = 1 << 16  # documents of one piece at most
SPLITS = ("train", "held_out")

Arrays = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_] | None]  # ids, lengths with EOS, which are learnt


@dataclass(frozen=True)
class EncodeTask:
    """One chunk to encode. `name`: of its files in `folder`. `limits`: PIECE_CHARS and PIECE_RECORDS."""

    name: str
    folder: str
    tokenizer: str
    format: RecordFormat
    held_out: float
    chunk: Chunk
    limits: tuple[int, int] = (PIECE_CHARS, PIECE_RECORDS)


class RecordEncoder(Protocol):
    """Records to ids."""

    vocab_size: int
    eos_id: int

    def encode(self, records: list[Record]) -> Arrays:
        """All documents behind one another, each with EOS; their lengths; which tokens are learnt, None for all."""


class TextEncoder:
    """Encodes running text."""

    def __init__(self, tokenizer: Tokenizer, group_chars: int) -> None:
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self._tokenizer = tokenizer
        self._group_chars = group_chars

    def encode(self, records: list[Record]) -> Arrays:
        """See Encoder; every token is learnt."""
        texts = [record.text for record in records if record.text is not None]
        return *encode_documents(self._tokenizer, texts, self._group_chars), None


def make_encoder(tokenizer_folder: Path, format: RecordFormat, group_chars: int) -> RecordEncoder:
    """The encoder of a format. Raises ConfigError and DataError for a tokenizer that cannot be used."""
    if format.format == "text":
        return TextEncoder(load_tokenizer(tokenizer_folder), group_chars)
    from phalanx.data.chat import ChatEncoder

    return ChatEncoder(
        tokenizer_folder,
        format.format,
        messages_key=format.messages_key,
        prompt_key=format.prompt_key,
        completion_key=format.completion_key,
        template=format.chat_template,
        loss_on=format.loss_on,
    )


def encode_chunk(task: EncodeTask, encoder: RecordEncoder, on_bytes: Callable[[int], None]) -> None:
    """Write the pieces of a chunk that are not there yet; `on_bytes(count)` tells how much of the source is done.

    Raises DataError naming file and place.
    """
    folder, meter, told = Path(task.folder), Meter(), 0
    done, skipped = count_finished_pieces(folder, task.name)
    try:
        for number, (arrays, taken) in enumerate(_pieces(task, encoder, meter, skipped), done):
            _write_piece(folder / f"{task.name}-{number:04d}", arrays, taken)
            done = number + 1
            on_bytes(min(meter.bytes, task.chunk.size_bytes) - told)
            told = min(meter.bytes, task.chunk.size_bytes)
    except DataError:
        if task.chunk.kind != LINES or not task.chunk.start:
            raise
        # How many lines lie before a chunk takes long to count, so it is only counted to name one.
        for _ in _pieces(task, encoder, Meter(), skipped, count_lines_before(task.chunk, task.format) + 1):
            continue
        raise
    write_json(folder / f"{task.name}.json", {"pieces": done, "chunk": asdict(task.chunk)})
    on_bytes(task.chunk.size_bytes - told)


def count_finished_pieces(folder: Path, name: str) -> tuple[int, int]:
    """How many pieces of a chunk are there, and how many of its documents they hold."""
    count = skipped = 0
    while (note := folder / f"{name}-{count:04d}.json").is_file() and note.with_suffix(".npz").is_file():
        skipped = json.loads(note.read_text())["documents"]
        count += 1
    return count, skipped


def _pieces(
    task: EncodeTask, encoder: RecordEncoder, meter: Meter, skipped: int, first_line: int = 1
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """(arrays of a piece, documents of the chunk up to its end)."""
    if task.chunk.kind == TOKENS:
        yield from _token_pieces(task, encoder, meter, skipped)
        return
    for train, held_out, taken in _batches(task, meter, skipped, first_line):
        ids, lengths, mask = encoder.encode(train + held_out)
        assert len(lengths) == len(train) + len(held_out)
        yield _split(ids, lengths, mask, len(train)), taken


def _batches(
    task: EncodeTask, meter: Meter, skipped: int, first_line: int
) -> Iterator[tuple[list[Record], list[Record], int]]:
    """(training records, held-out records, documents of the chunk up to here); empty texts are passed over."""
    keys = task.format.columns()
    train: list[Record] = []
    held_out: list[Record] = []
    chars = 0
    taken = skipped
    for taken, record in enumerate(read_records(task.chunk, task.format, meter, first_line), 1):
        if taken <= skipped or record.text == "":
            continue
        side = held_out if is_held_out(record_digest(record, keys), task.held_out) else train
        side.append(record)
        chars += len(record.text) if record.text is not None else _chars(record.fields)
        if chars >= task.limits[0] or len(train) + len(held_out) >= task.limits[1]:
            yield train, held_out, taken
            train, held_out, chars = [], [], 0
    if train or held_out:
        yield train, held_out, taken


def _chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_chars, value.values()))
    return sum(map(_chars, value)) if isinstance(value, list) else 8


def _token_pieces(
    task: EncodeTask, encoder: RecordEncoder, meter: Meter, skipped: int
) -> Iterator[tuple[dict[str, NDArray[Any]], int]]:
    """Documents that are token ids already; those without EOS at their end get it."""
    name, dtype = redact_url(task.chunk.paths[0]), token_dtype(encoder.vocab_size)
    with megatron_dataset.open_indexed_dataset(task.chunk.paths[0], task.format.storage_timeout_s) as pair:
        if skipped:
            return  # a chunk of tokens is one piece
        sides: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
        for number, ids in enumerate(pair.read_documents(task.chunk.start, task.chunk.stop), task.chunk.start):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
                wrong = int(ids.max()) if ids.min() >= 0 else int(ids.min())
                raise DataError(
                    f"{name}, document {number} holds the token {wrong}, but the tokenizer {task.tokenizer} has "
                    f"{encoder.vocab_size}; set data.tokenizer to the one that made these tokens"
                )
            body = ids[:-1] if len(ids) and ids[-1] == encoder.eos_id else ids
            if len(body):
                side = is_held_out(_ids_digest(body), task.held_out)
                sides[side].append(np.append(body, encoder.eos_id).astype(dtype))
    everything = [*sides[0], *sides[1]]
    meter.bytes = task.chunk.size_bytes
    if everything:
        lengths = np.fromiter(map(len, everything), np.int64, len(everything))
        yield _split(np.concatenate(everything), lengths, None, len(sides[0])), task.chunk.stop - task.chunk.start


def _ids_digest(ids: NDArray[Any]) -> bytes:
    return hashlib.sha256(ids.astype("<i4").tobytes()).digest()


def _split(
    ids: NDArray[Any], lengths: NDArray[np.int64], mask: NDArray[np.bool_] | None, train: int
) -> dict[str, NDArray[Any]]:
    border = int(lengths[:train].sum())
    arrays = {
        "train": ids[:border],
        "train_lengths": lengths[:train],
        "held_out": ids[border:],
        "held_out_lengths": lengths[train:],
    }
    if mask is not None:
        arrays |= {"train_mask": mask[:border], "held_out_mask": mask[border:]}
    return arrays


def _write_piece(path: Path, arrays: dict[str, NDArray[Any]], taken: int) -> None:
    temporary = path.with_suffix(".writing")
    with open(temporary, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path.with_suffix(".npz"))
    write_json(path.with_suffix(".json"), {"documents": taken})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a small JSON file that is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.writing")
    write_and_sync(temporary, json.dumps(content).encode())
    os.rename(temporary, path)


# ------------------------------------------------------------------------------------------------- the worker's process


def main() -> None:
    """A worker process: a line of JSON in on standard input is a task, lines out are progress, its end or its error.

    It ends when its input does, so also when its parent dies in whatever way.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its workers
    # All cores are busy with processes already. The tokenizer's library reads the C environment, not Python's copy.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    encoders: dict[tuple[str, RecordFormat], RecordEncoder] = {}

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    while True:
        task = _parse_task(json.loads(tasks.get()))
        try:
            known = (task.tokenizer, task.format)
            if known not in encoders:
                encoders[known] = make_encoder(Path(task.tokenizer), task.format, GROUP_CHARS)
            encode_chunk(task, encoders[known], lambda count: answer(bytes=count))
            answer(done=True)
        except BrokenPipeError:
            return  # the parent is gone
        except PhalanxError as error:
            answer(error=type(error).__name__, message=str(error))
        except OSError as error:
            answer(errno=error.errno, message=error.strerror or str(error), file=str(error.filename))
        except Exception:
            answer(error="", message=traceback.format_exc())


def _listen(tasks: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def _parse_task(content: dict[str, Any]) -> EncodeTask:
    return EncodeTask(
        content["name"],
        content["folder"],
        content["tokenizer"],
        RecordFormat(**content["format"]),
        content["held_out"],
        Chunk(**content["chunk"]),
        tuple(content["limits"]),
    )
