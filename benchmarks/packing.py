"""Rows of whole documents against padded batches, on the bundled conversations: learnt tokens a second.

Both peers train the same model on the same documents with the same weight for each learnt token, one after the other in
one call. "packed" is what the trainer does: rows of `seq_len`, no attention across documents. "padded" is what one
would write: one document a row, padded to the longest of its batch. Their losses must be the same.
"""

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.harness import Row, at_least, at_most, machine, options, report, result, spread
from phalanx.config.model import DataSection
from phalanx.data.loader import Loader
from phalanx.data.packing import PackedRows, PackingOptions
from phalanx.data.prepare import prepare
from phalanx.data.record_files import TokenFile
from phalanx.data.shuffle import shuffle_indices
from phalanx.layout.balance import Division
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.llama import Llama, init_slice
from phalanx.system import accelerator
from phalanx.tasks.language import IGNORE_INDEX, CausalLMTask
from phalanx.tasks.task import Batch

SEQ_LEN = 512
ROWS = 16  # packed rows of one step
MICRO_ROWS = 8  # packed rows of one forward pass
THREADS = 2
SMALL = ModelSpec(
    vocab_size=1, hidden=128, layers=3, heads=4, kv_heads=4, head_dim=32, intermediate=384, max_seq_len=SEQ_LEN
)
LARGE = replace(SMALL, hidden=1024, layers=12, heads=16, kv_heads=16, head_dim=64, intermediate=2816)


@dataclass
class Work:
    """One step's documents, in both forms, and how many of their tokens are learnt."""

    packed: list[Batch]
    padded: list[Batch]
    learnt: int

    def tokens(self, name: str) -> int:
        """Positions that the model computes."""
        return sum(batch.inputs["tokens"].numel() for batch in getattr(self, name))


def padded_batches(file: TokenFile, documents: list[int]) -> list[Batch]:
    """One document a row, padded to the longest of its batch; as many a batch as the packed peer has rows, so that the
    longest documents need no more memory than it does."""
    batches = []
    for first in range(0, len(documents), MICRO_ROWS):
        chosen = documents[first : first + MICRO_ROWS]
        whole = [file.document(document)[: SEQ_LEN + 1] for document in chosen]
        width = max(len(tokens) for tokens in whole) - 1
        tokens = torch.full((len(chosen), width), file.eos_id)
        labels = torch.full((len(chosen), width), IGNORE_INDEX)
        for row, (document, own) in enumerate(zip(chosen, whole, strict=True)):
            start, size = int(file.index[document]), len(own) - 1
            learnt = file.mask(start, start + size + 1)[1:]
            tokens[row, :size] = torch.from_numpy(own[:-1])
            labels[row, :size] = torch.from_numpy(np.where(learnt, own[1:], IGNORE_INDEX))
        weight = int((labels != IGNORE_INDEX).sum())
        batches.append(Batch({"tokens": tokens, "labels": labels}, weight, torch.arange(len(chosen))))
    return batches


def works(file: TokenFile, steps: int) -> list[Work]:
    """The documents of some steps of a run, in a random order for the padded peer, as a data set is shuffled."""
    form = PackingOptions(SEQ_LEN, packed=True)
    rows = PackedRows(file, form, 0)
    loader = Loader([(rows, 1.0)], ROWS, 0, 0)
    task = CausalLMTask(SEQ_LEN, isolated=True)
    found = []
    for step in range(steps):
        packed = [task.collate(samples) for samples in loader.batches(step, Division((ROWS,), -(-ROWS // MICRO_ROWS)))]
        numbers = shuffle_indices(0, 0, rows.count, np.arange(step * ROWS, (step + 1) * ROWS))
        documents = [document for number in numbers for document in rows.documents(int(number))]
        shuffled = np.random.default_rng(step).permutation(documents).tolist()
        found.append(Work(packed, padded_batches(file, shuffled), sum(batch.weight for batch in packed)))
    return found


def make_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Llama:
    """A model with the initial weights of the trainer."""
    model = Llama(spec).to(device, dtype)
    for name, size in parameter_shapes(spec).items():
        parameter = model.get_parameter(name)
        values = init_slice(spec, 0, name, 0, parameter.numel(), device, torch.float32)
        parameter.data.copy_(values.view(size))
    return model


def train(model: Llama, optimizer: torch.optim.Optimizer, batches: list[Batch], learnt: int) -> float:
    """One step on these batches: the mean loss of the learnt tokens."""
    total = torch.zeros((), device=model.embed.weight.device)
    for batch in batches:
        loss = model(**batch.inputs)
        (loss / learnt).backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total) / learnt  # the host waits for the device here


def compare(file: TokenFile, turns: int, device: torch.device) -> tuple[list[Row], float]:
    """A row a peer, and how far their losses are apart at most."""
    on_host = device.type == "cpu"
    given = [
        Work([b.to(device) for b in work.packed], [b.to(device) for b in work.padded], work.learnt)
        for work in works(file, turns + 1)
    ]
    names = ("padded", "packed")
    spec = replace(SMALL if on_host else LARGE, vocab_size=file.vocab_size)
    dtype = torch.float32 if on_host else torch.bfloat16
    models = {name: make_model(spec, device, dtype) for name in names}
    optimizers = {name: torch.optim.AdamW(models[name].parameters(), lr=1e-4) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    apart = 0.0
    for turn, work in enumerate(given):
        losses = {}
        for name in sorted(names, reverse=turn % 2 == 1):
            begun = time.perf_counter()
            losses[name] = train(models[name], optimizers[name], getattr(work, name), work.learnt)
            if turn:  # the first is to warm up
                seconds[name].append(time.perf_counter() - begun)
        apart = max(apart, abs(losses["packed"] - losses["padded"]) / losses["padded"])
    rows: list[Row] = []
    for name in names:
        ratios = [slow / own for slow, own in zip(seconds["padded"], seconds[name], strict=True)]
        low, middle, high = spread(ratios)
        learnt, computed = sum(w.learnt for w in given[1:]), sum(w.tokens(name) for w in given[1:])
        rows.append(
            {
                "peer": name,
                "learnt tokens/s": spread([w.learnt / s for w, s in zip(given[1:], seconds[name], strict=True)])[1],
                "speed over padded": middle,
                "quartiles": f"{low:.3f} .. {high:.3f}",
                "computed a learnt token": computed / learnt,
            }
        )
    return rows, apart


def main() -> None:
    arguments = options(__doc__ or "").parse_args()
    torch.set_num_threads(THREADS)
    name = next(iter(accelerator.list_devices()), "cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = DataSection(
            source=["stdlib-chat"],
            format="chat",
            chat_template="chatml",
            tokenizer="train",
            seq_len=SEQ_LEN,
            cache=folder,
        )
        [(train_set, _)] = prepare(data).train
        file = TokenFile(train_set)
        begun = time.perf_counter()
        packed = PackedRows(file, PackingOptions(SEQ_LEN, packed=True), 0)
        packing_s = time.perf_counter() - begun
        rows, apart = compare(file, 6 if arguments.quick else 20, torch.device(name))
    model = None if name == "cpu" else accelerator.get_model_name(name)
    facts: Row = {
        "documents": file.documents,
        "tokens": file.tokens,
        "rows": packed.count,
        "filled": packed.filled,
        "cut": packed.too_long,
        "packing, s": packing_s,
    }
    checks = [
        at_least("packed: learnt tokens/s over padded", rows[1]["speed over padded"], 1.5),
        at_least("share of the rows that is documents", packed.filled, 0.98),
        at_most("losses apart, relative", apart, 1e-4 if name == "cpu" else 2e-2),
    ]
    report(result("packing", machine(model, THREADS), [facts, *rows], checks), arguments.json)


if __name__ == "__main__":
    main()
