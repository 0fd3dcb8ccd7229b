"""Weights out to a Hugging Face folder and in again, beside plain writing and reading of as many bytes; with `--gb` the
conversion of a large folder to Megatron and back.

What is timed is what a run does: `export` rounds, writes, syncs and renames a folder of several files; an import reads
every tensor of it into memory that is there already. Speeds are of the file's bytes. Reading is from the page cache
(the machine's memory) and from the disk, dropped from the cache before; of a virtual disk the first reading may be
slower than all others, so it does not count.
"""

import functools
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from phalanx.compat.convert import convert_checkpoint
from phalanx.compat.megatron.export import export_megatron, open_hf_source
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import PRESETS, parameter_shapes
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights

SHARD_BYTES = 1_000_000_000
PORTION_BYTES = 8 << 20
TARGET = 1.0  # GB/s, or what the disk gives


class Added:
    """Bytes that a block of code adds to the process's own memory at its height, sampled every 2 ms."""

    def __enter__(self) -> "Added":
        self.bytes, self._first, self._over = 0, _resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, _resident() - self._first)


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def drop(folder: Path) -> None:
    """Take files out of the page cache."""
    for path in folder.iterdir():
        if path.is_dir():
            continue
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def write_plainly(path: Path, size: int, source: Tensor) -> None:
    """As many bytes as they come, and brought to the disk."""
    content = memoryview(source.view(torch.uint8).numpy().data)
    with open(path, "wb", buffering=0) as file:
        while size:
            size -= file.write(content[: min(size, PORTION_BYTES, len(content))])
        os.fsync(file.fileno())


def read_plainly(folder: Path) -> None:
    """All bytes of the weights, into one small buffer."""
    portion = bytearray(PORTION_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(portion):
                pass


def bring_in(folder: Path, spec: ModelSpec, kept: dict[str, Tensor]) -> None:
    """Every tensor of the folder, into memory that is there already."""
    weights = Weights(folder)
    weights.check(spec)
    for name, out in kept.items():
        weights.read_into(name, 0, out.numel(), out)


def compare(spec: ModelSpec, turns: int, place: Path, shard_bytes: int) -> tuple[list[Row], list[Check]]:
    """A row a way: its speed in GB/s over the turns, and the memory that it added beside what is kept."""
    shapes = parameter_shapes(spec)
    largest = max(math.prod(shape) for shape in shapes.values())
    torch.manual_seed(0)
    masters = torch.randn(largest)
    size = 2 * sum(math.prod(shape) for shape in shapes.values())
    seconds: dict[str, list[float]] = {}
    added: dict[str, int] = {}

    def whole(name: str) -> Tensor:
        return masters[: math.prod(shapes[name])]

    def timed(way: str, work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        with Added() as memory:
            work()
            taken = time.perf_counter() - begun
        seconds.setdefault(way, []).append(taken)
        added[way] = max(added.get(way, 0), memory.bytes)

    for turn in range(turns + 1):
        folder, plain = place / "model", place / "plain"
        timed("plain writing", functools.partial(write_plainly, plain, size, masters))
        plain.unlink()
        again = functools.partial(export, folder, spec, whole, torch.bfloat16, max_shard_bytes=shard_bytes)
        timed("export from fp32", again)
        for dtype in (torch.bfloat16, torch.float32):
            kept = {name: torch.zeros(math.prod(shape), dtype=dtype) for name, shape in shapes.items()}
            for tensor in kept.values():
                tensor.fill_(1.0)  # memory that is only promised would be taken during the import
            name = str(dtype).removeprefix("torch.")
            for where in ("disk", "memory"):
                for way, work in (
                    (f"plain reading, {where}", lambda folder=folder: read_plainly(folder)),
                    (f"import as {name}, {where}", lambda folder=folder, kept=kept: bring_in(folder, spec, kept)),
                ):
                    if where == "disk":
                        drop(folder)
                    timed(way, work)
            del kept
        shutil.rmtree(folder)
        if not turn:  # to warm up
            seconds.clear()
            added.clear()
    rows: list[Row] = []
    for way, times in seconds.items():
        low, middle, high = spread([size / 1e9 / taken for taken in times])
        rows.append({"way": way, "GB": size / 1e9, "GB/s": middle, "quartiles": f"{low:.3g} .. {high:.3g}",
                     "memory added, GB": added[way] / 1e9})  # fmt: skip
    speed = {str(row["way"]): float(row["GB/s"]) for row in rows}
    checks = [
        at_least("export, GB/s", speed["export from fp32"], min(TARGET, speed["plain writing"])),
        *(
            at_least(f"import as {name}, {where}, GB/s", speed[f"import as {name}, {where}"],
                     min(TARGET, speed[f"plain reading, {where}"]))
            for name in ("bfloat16", "float32") for where in ("disk", "memory")
        ),
        *(
            at_most(f"{way}: memory beside what is kept, GB", added[way] / 1e9, shard_bytes / 1e9)
            for way in added if not way.startswith("plain")
        ),
    ]  # fmt: skip
    return rows, checks


def compare_conversions(spec: ModelSpec, place: Path, shard_bytes: int) -> tuple[list[Row], list[Check]]:
    """A row a conversion of a folder that another program reads or wrote, beside plain writing of as many bytes; the
    memory is that of the process, beside mapped files."""
    shapes = parameter_shapes(spec)
    size = 2 * sum(math.prod(shape) for shape in shapes.values())
    torch.manual_seed(0)
    masters = torch.randn(max(math.prod(shape) for shape in shapes.values()))
    hf, core, whole, again, plain = (place / name for name in ("hf", "megatron", "torch_dist", "again", "plain"))
    ways: dict[str, Callable[[], object]] = {
        "plain writing": functools.partial(write_plainly, plain, size, masters),
        "Hugging Face to Megatron, 2 x 2 ranks": lambda: export_megatron(open_hf_source(hf), core, 2, 2),
        "Megatron to Hugging Face": lambda: convert_checkpoint(core, again, config=None),
        "Hugging Face to torch_dist": lambda: export_megatron(open_hf_source(hf), whole, ckpt_format="torch_dist"),
        "torch_dist to Hugging Face": lambda: convert_checkpoint(whole, again, config=None),
    }
    export(
        hf, spec, lambda name: masters[: math.prod(shapes[name])], torch.bfloat16, max_shard_bytes=shard_bytes
    )  # fmt: skip
    rows: list[Row] = []
    for way, work in ways.items():
        for folder in (hf, core, whole):
            for each in [folder, *folder.rglob("*")] if folder.exists() else []:
                if each.is_dir():
                    drop(each)
        begun = time.perf_counter()
        with Added() as memory:
            work()
            os.sync()
            taken = time.perf_counter() - begun
        rows.append({"way": way, "GB": size / 1e9, "GB/s": size / 1e9 / taken, "memory added, GB": memory.bytes / 1e9})
        plain.unlink(missing_ok=True)
        shutil.rmtree(again, ignore_errors=True)
    files = (path for folder in (core, whole) for path in folder.rglob("*") if path.is_file())
    largest = max(path.stat().st_size for path in files) + 2 * masters.numel()  # and the matrix a part is cut from
    speed = float(rows[0]["GB/s"])
    checks = [
        check
        for row in rows[1:]
        for check in (
            at_least(f"{row['way']}, GB/s", float(row["GB/s"]), speed / 2),
            at_most(f"{row['way']}: memory, GB, one file and matrix", float(row["memory added, GB"]), largest / 1e9),
        )
    ]
    return rows, checks


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--gb", type=float, help="convert a folder of this size to Megatron and back instead, once")
    parser.add_argument("--folder", type=Path, help="where to write, about 6 GB. Default: the temporary folder")
    arguments = parser.parse_args()
    spec = PRESETS["llama-3.2-1b"]
    if arguments.quick:
        spec = replace(spec, layers=2)
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        if arguments.gb is not None:
            layers = max(2, 2 * round((arguments.gb - 0.53) / 0.122 / 2))
            rows, checks = compare_conversions(replace(spec, layers=layers), Path(place), SHARD_BYTES)
            report(result("convert", machine(None, threads), rows, checks), arguments.json)
            return
        rows, checks = compare(spec, 3 if arguments.quick else 7, Path(place), SHARD_BYTES)
    report(result("convert", machine(None, threads), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
