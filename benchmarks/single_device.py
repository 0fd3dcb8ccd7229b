"""How fast one device trains with Phalanx: beside a plain PyTorch loop and transformers.Trainer, and against the chip.

    python3 benchmarks/single_device.py [--quick] [--json FILE]

Without an accelerator: the same small Llama on the same tokens, in fp32, by all of them in turns. With one: that too,
in bf16 and compiled, and the published shapes of 1B, 3B and 8B parameters by Phalanx alone, as model FLOPs utilisation
and as a share of the matrix-multiply rate measured in the same call. docs/benchmarks.md says how to read the figures.
"""

import gc
import importlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.peers import (
    Case,
    Peer,
    Plain,
    batches_of,
    drive_trainer,
    own_loss,
    own_model,
    phalanx,
    synchronise,
    transformers_loss,
    transformers_model,
    write_tokens,
)
from phalanx.core.errors import is_out_of_memory
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import PRESETS, flops_per_token, parameter_count
from phalanx.system import accelerator

CPU_SPEC = ModelSpec(
    vocab_size=8192, hidden=384, layers=8, heads=6, kv_heads=2, head_dim=64, intermediate=1024, max_seq_len=512
)
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
SEQUENCES = (4096, 8192)
STEP_TOKENS = 32768  # of one step when the chip is measured; real runs take more, and then the update weighs less
MICRO_TOKENS = 16384  # of one forward pass, at most; beyond it nothing more was to be gained
# Bytes of state per parameter: fp32 master, two moments and a sum of gradients; weights and a gradient in bf16.
STATE_BYTES, STATE_SHARE, ACTIVATION_SHARE = 20, 0.62, 0.25
MFU_TARGET, MFU_STRETCH = 0.50, 0.58
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


# ----------------------------------------------------------------------------------------------- side by side, in turns


@dataclass(frozen=True)
class Took:
    """Seconds of one step: by the clock, and of the host's cores in all threads of this process."""

    wall: float
    cpu: float


Times = dict[str, list[Took]]  # by name, one entry a turn


@dataclass(frozen=True)
class Effort:
    """How long to measure: `cycles` turns of `block` steps by each, after one turn that does not count.

    A machine that is slow today stops after `seconds`, with the turns that it has made by then, at least two.
    """

    cycles: int
    block: int
    seconds: float = 600.0


def compare(case: Case, effort: Effort) -> tuple[list[Row], list[Check]]:
    """Train `case` by everyone in turns, a few steps each, and compare the times of the same turn.

    The machine's speed drifts, so only what was measured within seconds of each other is divided; a ratio is the median
    over the turns. Who follows whom changes from turn to turn. Without transformers or accelerate its rows are missing.
    """
    steps = (1 + effort.cycles) * effort.block
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as scratch:
        tokens = write_tokens(Path(scratch, "tokens"), case.spec.vocab_size, steps * case.tokens + 1)
        batch = batches_of(case, tokens)
        batches = [batch(step) for step in range(steps)]
        with phalanx(case, tokens, Path(scratch, "run")) as ours:
            others: list[Peer] = [ours, *_plain_loops(case, batches)]
            times: Times = {peer.name: [] for peer in others}
            losses: dict[str, list[float]] = {}
            turn = _Turns(others, times, effort)
            if find_spec("transformers") and find_spec("accelerate"):
                times["Trainer"] = []
                losses["Trainer"] = drive_trainer(case, batches, Path(scratch, "hf"), effort.block, turn)
            else:
                print("transformers or accelerate is not installed, so Trainer is left out; install both to compare.")
                while turn():
                    pass
            losses |= {peer.name: peer.losses() for peer in others}
    # The first turn compiles, allocates and warms caches.
    return _compared(case, {name: took[1:] for name, took in times.items()}, losses, effort.block)


class _Turns:
    """Called when Trainer, if it takes part, has made its steps of a turn: lets the others make theirs.

    Returns whether there is to be another turn.
    """

    def __init__(self, others: list[Peer], times: Times, effort: Effort) -> None:
        self.others, self.times, self.effort = others, times, effort
        self.made = 0
        self.began = self.wall = time.perf_counter()
        self.cpu = time.process_time()

    def __call__(self) -> bool:
        if "Trainer" in self.times:
            self.times["Trainer"].append(self._since())
        for peer in self.others:
            self._since()
            peer.run(self.effort.block)
            self.times[peer.name].append(self._since())
        self.others.append(self.others.pop(0))
        self.made += 1
        self._since()
        late = self.wall - self.began > self.effort.seconds and self.made > 2
        return self.made <= self.effort.cycles and not late

    def _since(self) -> Took:
        """What a step took since the last call."""
        wall, cpu = time.perf_counter(), time.process_time()
        took = Took((wall - self.wall) / self.effort.block, (cpu - self.cpu) / self.effort.block)
        self.wall, self.cpu = wall, cpu
        return took


def _plain_loops(case: Case, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Peer]:
    loops: list[Peer] = []
    if case.dtype == "fp32":  # the loss's own arithmetic is not made for autocast
        loops.append(Plain("plain loop, our model", own_model(case.spec, case.device), own_loss, case, batches))
    if find_spec("transformers"):
        model = transformers_model(case.spec, case.device)
        loops.append(Plain("plain loop, transformers' model", model, transformers_loss, case, batches))
    return loops


def _compared(case: Case, times: Times, losses: dict[str, list[float]], block: int) -> tuple[list[Row], list[Check]]:
    ours = times["Phalanx"]
    ratios: dict[str, float] = {}
    rows: list[Row] = []
    for name, took in times.items():
        low, middle, high = spread([theirs.wall / mine.wall for theirs, mine in zip(took, ours, strict=True)])
        by_cpu = statistics.median(theirs.cpu / mine.cpu for theirs, mine in zip(took, ours, strict=True))
        step_s = statistics.median(one.wall for one in took)
        ratios[name] = middle
        rows.append(
            {
                "trained by": name,
                "parameters, M": round(parameter_count(case.spec) / 1e6, 1),
                "dtype": case.dtype,
                "tokens a step": case.tokens,
                "turns x steps": f"{len(took)} x {block}",
                "step, s": step_s,
                "tokens/s": case.tokens / step_s,
                "Phalanx's speed over it": middle,
                "quartiles": f"{low:.3f} .. {high:.3f}",
                "by CPU time": by_cpu,
                "last loss": losses[name][-1],
            }
        )
    reference = losses["Phalanx"]
    apart = max(
        abs(theirs - mine) / abs(mine) for name in losses for theirs, mine in zip(losses[name], reference, strict=True)
    )
    checks = [at_most("largest relative difference of a loss", apart, 1e-4 if case.dtype == "fp32" else 2e-2)]
    plain = [ratio for name, ratio in ratios.items() if name.startswith("plain loop")]
    if case.device.type == "cpu":
        checks.append(at_least("speed over the better plain loop", min(plain, default=None), 0.98))
        checks.append(at_least("speed over transformers.Trainer", ratios.get("Trainer"), 1.0))
    return rows, checks


# ---------------------------------------------------------------------------------------------- against the chip itself


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int, repeats: int = 12) -> float:
    """FLOP/s of a square matrix product of random data: the median of `repeats` after three that do not count.

    Random data matters: of zeros the chip draws less power and runs faster than it ever does in training.
    """
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    seconds = []
    for _ in range(3 + repeats):
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(4):
            torch.mm(left, right, out=out)
        synchronise(device)
        seconds.append((time.perf_counter() - begun) / 4)
    return 2 * size**3 / statistics.median(seconds[3:])


def fitting(spec: ModelSpec, memory_bytes: int, ranks_of_state: int = 1) -> ModelSpec:
    """`spec` with as many of its layers as leave room for activations beside the state of training."""
    room = memory_bytes * STATE_SHARE / (STATE_BYTES * ranks_of_state)
    layers = spec.layers
    while layers > 1 and parameter_count(replace(spec, layers=layers)) > room:
        layers -= 1
    return replace(spec, layers=layers)


def first_micro_batch(spec: ModelSpec, seq_len: int, memory_bytes: int) -> int:
    """Sequences of a forward pass to begin with: a power of two, by what a block keeps for its backward pass."""
    kept = 2 * (6 * spec.hidden + 2 * spec.heads * spec.head_dim + 3 * spec.intermediate)
    affordable = memory_bytes * ACTIVATION_SHARE / (kept * spec.layers)
    most = min(MICRO_TOKENS, affordable) // seq_len
    return 1 << max(0, int(most).bit_length() - 1)


def utilisation(case: Case, effort: Effort, published_layers: int, name: str, mm_rate: float) -> Row:
    """Train `case` by Phalanx alone and set its speed against the chip's."""
    steps = effort.block * (1 + effort.cycles)
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as scratch:
        tokens = write_tokens(Path(scratch, "tokens"), case.spec.vocab_size, steps * case.tokens + 1)
        with phalanx(case, tokens, Path(scratch, "run")) as ours:
            ours.run(effort.block)
            seconds = []
            for _ in range(effort.cycles):
                begun = time.perf_counter()
                ours.run(effort.block)
                seconds.append((time.perf_counter() - begun) / effort.block)
            loss = ours.losses()[-1]
            memory_bytes = max(record["memory_bytes"] for record in ours.records)
    tokens_per_s = case.tokens / statistics.median(seconds)
    full, causal = flops_per_token(case.spec, case.seq_len)
    peak = accelerator.peak_flops(accelerator.get_device_name(case.device), DTYPES[case.dtype])
    return {
        "model": name,
        "layers": f"{case.spec.layers} of {published_layers}",
        "sequence": case.seq_len,
        "micro-batch": case.micro_batch,
        "tokens a step": case.tokens,
        "step, s": statistics.median(seconds),
        "tokens/s": tokens_per_s,
        "TFLOP/s": tokens_per_s * full / 1e12,
        "MFU": None if peak is None else tokens_per_s * full / peak,
        "MFU, causal": None if peak is None else tokens_per_s * causal / peak,
        "of matmul rate": tokens_per_s * full / mm_rate,
        "memory, GiB": memory_bytes / 2**30,
        "last loss": loss,
    }


def utilisation_that_fits(case: Case, effort: Effort, published_layers: int, name: str, mm_rate: float) -> Row | None:
    """As `utilisation`; while memory runs out, with half the micro-batch. None when not even one sequence fits."""
    while True:
        try:
            return utilisation(case, effort, published_layers, name, mm_rate)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        print(f"{name} at {case.seq_len}: a micro-batch of {case.micro_batch} does not fit", file=sys.stderr)
        forget(case.device)
        if case.micro_batch == 1:
            return None
        case = replace(case, micro_batch=case.micro_batch // 2)


def forget(device: torch.device) -> None:
    """Give back what the last model held, compiled code too: shapes seen before would make it compile for any shape."""
    torch.compiler.reset()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


@dataclass(frozen=True)
class Chip:
    """What is trained to measure the chip: small numbers here let a CPU walk the same path in a test."""

    models: dict[str, ModelSpec]
    sequences: tuple[int, ...]
    step_tokens: int
    matmul_size: int
    memory_bytes: int
    dtype: str = "bf16"
    compile: bool = True


def against_the_chip(device: torch.device, chip: Chip, effort: Effort) -> tuple[list[Row], list[Check]]:
    """Utilisation of each model at each sequence length, with the matrix-multiply rate measured before each."""
    rows: list[Row] = []
    rates: list[float] = []
    for name, published in chip.models.items():
        spec = fitting(published, chip.memory_bytes)
        for seq_len in chip.sequences:
            forget(device)
            rates.append(matmul_rate(device, DTYPES[chip.dtype], chip.matmul_size))
            micro_batch = min(first_micro_batch(spec, seq_len, chip.memory_bytes), max(1, chip.step_tokens // seq_len))
            case = Case(
                replace(spec, max_seq_len=max(spec.max_seq_len, seq_len)),
                seq_len,
                micro_batch,
                max(1, chip.step_tokens // seq_len),
                chip.dtype,
                chip.compile,
                device,
            )
            row = utilisation_that_fits(case, effort, published.layers, name, rates[-1])
            if row is not None:
                print(f"measured: {row}", file=sys.stderr)  # a long run that breaks later has said this much
                rows.append(row)
    checks = []
    for row in rows:
        where = f"{row['model']} ({row['layers']} layers) at {row['sequence']}"
        checks.append(at_least(f"MFU, {where}", row["MFU"], MFU_TARGET))
        checks.append(at_least(f"MFU, {where}, stretch", row["MFU"], MFU_STRETCH))
    matmul: Row = {
        "matrix product": f"{chip.matmul_size}, {chip.dtype}, random",
        "TFLOP/s, median": statistics.median(rates) / 1e12,
        "least": min(rates) / 1e12,
        "most": max(rates) / 1e12,
    }
    return [matmul, *rows], checks


# ----------------------------------------------------------------------------------------------------------------- main


def on_cpu(quick: bool) -> tuple[list[Row], list[Check]]:
    """The comparison on the CPU."""
    case = Case(CPU_SPEC, 512, 2, 2, "fp32", False, torch.device("cpu"))
    return compare(case, Effort(cycles=8, block=1, seconds=45) if quick else Effort(cycles=60, block=1, seconds=220))


def on_accelerator(
    device: torch.device, quick: bool, models: list[str], sequences: list[int]
) -> tuple[list[Row], list[Check]]:
    """Utilisation first, on a chip that is empty, then the comparison at the smallest of the models."""
    _, total_bytes = torch.accelerator.get_memory_info(device)
    chip = Chip({name: PRESETS[name] for name in models}, tuple(sequences), STEP_TOKENS, 8192, total_bytes)
    rows, checks = against_the_chip(device, chip, Effort(cycles=3, block=2))
    if quick:
        return rows, checks
    forget(device)
    # Three or four models are held at once, each with its state.
    spec = fitting(PRESETS[MODELS[0]], total_bytes, ranks_of_state=4)
    more_rows, more_checks = compare(Case(spec, 4096, 2, 2, "bf16", True, device), Effort(cycles=6, block=4))
    return rows + more_rows, checks + more_checks


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; the exit code is 0 when it ran, whatever holds."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: leave an accelerator alone")
    parser.add_argument("--models", default=",".join(MODELS), help="of the accelerator's part, by comma")
    parser.add_argument("--sequences", default=",".join(map(str, SEQUENCES)), help="its sequence lengths, by comma")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.models.split(",") if name not in PRESETS]
    if unknown:
        parser.error(f"--models names {', '.join(unknown)}; choose of {', '.join(PRESETS)}")
    try:
        importlib.import_module("phalanx.trainer.train_rank")
    except ModuleNotFoundError as error:
        sys.exit(
            f"Phalanx's loop needs the package {error.name}, which is not installed; install it, or carry its wheel"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process: its groups need no network
    devices = accelerator.list_devices() if given.device == "auto" else []
    device = torch.device(devices[0] if devices else "cpu")
    accelerator.set_device(device, accelerator.host_cores())
    if device.type == "cpu":
        rows, checks = on_cpu(given.quick)
    else:
        models, sequences = given.models.split(","), [int(number) for number in given.sequences.split(",")]
        rows, checks = on_accelerator(
            device, given.quick, models[:1] if given.quick else models, sequences[:1] if given.quick else sequences
        )
    chip = accelerator.get_device_name(device) if devices else None
    report(result("single_device", machine(chip, torch.get_num_threads()), rows, checks), given.json)


if __name__ == "__main__":
    main()
