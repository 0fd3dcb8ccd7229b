"""Preparing data against the tokenizer library's own batch rate, and what the batch of a step costs.

`phalanx data prepare` does everything that a run needs: it reads, hashes, encodes, writes, syncs and joins. The library
only encodes, from memory into its own objects. The loader's time is set against a step of 50 ms.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from phalanx.config.model import DataSection
from phalanx.data.loader import Loader
from phalanx.data.packing import PackingOptions, make_rows
from phalanx.data.prepare import prepare
from phalanx.data.read_chunks import Meter, plan_chunks, read_records
from phalanx.data.record_files import TokenFile
from phalanx.data.records import RecordFormat
from phalanx.data.sources import list_files
from phalanx.data.tokenizer import load_tokenizer
from phalanx.layout.balance import Division
from phalanx.tasks.language import CausalLMTask

THREADS = 2
STEP_S = 0.05  # a short step: where steps are longer the loader matters less
# Sequence length, and sequences of one step on one rank: 8,192 tokens, which in 50 ms are 160,000 a second.
SHAPES = ((512, 16), (2048, 4), (8192, 1))
TEXT, CHAT = "stdlib", "stdlib-chat"
VOCAB = 16384
COPIES = 4  # of the standard library, 46 MB: half a second goes into starting processes, whatever there is to do


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(THREADS)  # read when the library is first used
    with tempfile.TemporaryDirectory() as folder:
        rows, checks = tokenising(Path(folder), COPIES, turns=3 if arguments.quick else 5)
        more, more_checks = loading(Path(folder), turns=100 if arguments.quick else 400)
    report(result("data", machine(None, THREADS), [*rows, *more], [*checks, *more_checks]), arguments.json)


def tokenising(folder: Path, copies: int, turns: int) -> tuple[list[Row], list[Check]]:
    """A row a way; the library gets all texts in one call, `prepare` the files, JSON lines, with as many processes."""
    source, texts = write_source(folder, copies)
    size = sum(len(text.encode()) for text in texts)
    first = prepare(DataSection(source=[TEXT], tokenizer="train", tokenizer_vocab=VOCAB, cache=str(folder / "0")))
    backend = load_tokenizer(first.tokenizer_folder).backend
    seconds: dict[str, list[float]] = {"the library's encode_batch_fast": [], "phalanx data prepare": []}

    def library(turn: int) -> int:
        return sum(len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False))

    def ours(turn: int) -> int:
        data = DataSection(source=[source], tokenizer=str(first.tokenizer_folder), held_out=0.01, workers=THREADS,
                           cache=str(folder / f"cache-{turn}"))  # fmt: skip
        made = prepare(data)
        files = [TokenFile(made.train[0][0]), *map(TokenFile, made.held_out.values())]
        return sum(file.tokens - file.documents for file in files)

    counts: set[int] = set()
    for turn in range(turns):
        for name, way in sorted(zip(seconds, (library, ours), strict=True), reverse=turn % 2 == 1):
            begun = time.perf_counter()
            counts.add(way(turn))
            seconds[name].append(time.perf_counter() - begun)
    assert len(counts) == 1, f"different tokens: {counts}"
    rows: list[Row] = []
    for name, times in seconds.items():
        low, middle, high = spread([size / value / 1e6 for value in times])
        rows.append(
            {
                "way": name,
                "text, MB": size / 1e6,
                "tokens": counts.copy().pop(),
                "MB/s": middle,
                "quartiles": f"{low:.3g} .. {high:.3g}",
            }
        )
    theirs, own = seconds.values()
    ratio = spread([a / b for a, b in zip(theirs, own, strict=True)])[1]
    return rows, [at_least("tokenising: prepare over the library alone", ratio, 0.9)]


def write_source(folder: Path, copies: int) -> tuple[str, list[str]]:
    """The standard library several times over as JSON lines; each copy is another text to a cache of words."""
    format = RecordFormat()
    found = [record.text or "" for chunk in plan_chunks(list_files([TEXT]), format)
             for record in read_records(chunk, format, Meter())]  # fmt: skip
    texts = [text.replace("self", f"self{copy}") for copy in range(copies) for text in found if text]
    path = folder / "source.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return str(path), texts


def loading(folder: Path, turns: int) -> tuple[list[Row], list[Check]]:
    """A row a shape and kind of set: the time to make one step's batch, as a trainer asks for it."""
    text = prepare(DataSection(source=[TEXT], tokenizer="train", tokenizer_vocab=VOCAB, cache=str(folder / "0")))
    chat = prepare(
        DataSection(source=[CHAT], format="chat", chat_template="chatml", tokenizer=str(text.tokenizer_folder),
                    cache=str(folder / "0"))
    )  # fmt: skip
    rows: list[Row] = []
    for seq_len, batch in SHAPES:
        for name, made, packed in (("text", text, False), ("chat, packed", chat, True)):
            loader = Loader(
                [
                    (make_rows(TokenFile(path), PackingOptions(seq_len, packed=packed), 0), weight)
                    for path, weight in made.train
                ],
                global_batch=batch,
                seed=0,
                rank=0,
            )
            task = CausalLMTask(seq_len, isolated=packed)
            times = []
            for step in range(turns):
                begun = time.perf_counter()
                for samples in loader.batches(step, Division((batch,), 1)):
                    task.collate(samples)
                times.append(time.perf_counter() - begun)
            rows.append(
                {
                    "loader": name,
                    "sequence": seq_len,
                    "sequences": batch,
                    "ms a step, median": spread(times)[1] * 1e3,
                    "ms, 99 of 100": float(np.percentile(times, 99)) * 1e3,
                    "of a 50 ms step": spread(times)[1] / STEP_S,
                }
            )
    return rows, [
        at_most(f"loader, {row['loader']}, {row['sequences']} x {row['sequence']}", row["of a 50 ms step"], 0.01)
        for row in rows
    ]


if __name__ == "__main__":
    main()
