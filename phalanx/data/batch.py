"""What a global batch is made of: which samples of which sources, where their tokens lie, and how they begin."""

from dataclasses import dataclass
from typing import Any

from phalanx.data.loader import Loader, SampleSet
from phalanx.data.packing import PackedRows, TextWindows
from phalanx.data.tokenizer import Tokenizer

PREVIEW_TOKENS = 24  # of a sample, as text


@dataclass(frozen=True)
class BatchSample:
    """One sample of a batch: its position in the run, from 0; the number of its source and its row there; the epoch of
    that source, from 0; where the row lies, in words; its token ids."""

    position: int
    source: int
    epoch: int
    row: int
    place: str
    tokens: list[int]


def list_samples(loader: Loader, step: int, skipped: int = 0) -> list[BatchSample]:
    """The samples of step `step` (the first is 0), in order, of which each rank takes a contiguous slice. `skipped` is
    as of `Loader.batches`."""
    found = []
    for position, source, epoch, row in loader.list_positions(step, skipped):
        rows = loader.sources[source]
        sample: Any = rows.sample(row, position)
        found.append(BatchSample(position, source, epoch, row, _place(rows, row), sample.tokens.tolist()))
    return found


def _place(rows: SampleSet, row: int) -> str:
    if isinstance(rows, TextWindows):
        start, stop = rows.span(row)
        return f"tokens {start} to {stop - 1}"
    if isinstance(rows, PackedRows):
        documents = rows.documents(row).tolist()
        return f"document{'s' if len(documents) > 1 else ''} {', '.join(map(str, documents))}"
    return f"record {row}"


def preview_text(member: BatchSample, tokenizer: Tokenizer) -> str:
    """The first tokens of a sample as text on one line."""
    text: str = tokenizer.backend.decode(member.tokens[:PREVIEW_TOKENS], skip_special_tokens=False)
    return " ".join(text.split())
