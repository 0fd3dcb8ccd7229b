"""Inputs of checkpointed blocks that wait on the host: memory and time beside keeping them, and beside PyTorch's ways.

    python3 benchmarks/offload.py [--quick] [--json FILE]

A Llama of the 8B shape in bf16, whose blocks are all computed again in the backward pass, walks forward and backward at
lengths of 8k to 64k tokens in turns: with the blocks' inputs kept on the device, moved by Phalanx, moved by
`save_on_cpu` around the model, and by `offload_wrapper` around each block. Peaks are what a pass adds to parameters and
gradients. Then each way is given longer and longer rows. It takes an accelerator: on a CPU there is nothing to gain.
"""

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from phalanx.core.errors import is_out_of_memory
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.catalog import PRESETS
from phalanx.models.llama import Llama
from phalanx.parallel import activations
from phalanx.parallel.offload import offload
from phalanx.system import accelerator

LENGTHS = (8192, 16384, 32768, 65536)
HORIZON = 2
KEPT, OURS = "kept on the device", "Phalanx"
PEERS = ("save_on_cpu", "offload_wrapper")
LONGER = 1.25  # from one length that is tried to the next, in the search for the longest


@contextlib.contextmanager
def way_of(name: str, model: Llama) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """`model` with its blocks computed again and their inputs moved in the way `name`; gives what surrounds a forward
    pass. Afterwards the model is as it was."""
    blocks = list(model.layers)
    activations.recompute(blocks, selective=False)
    if name == OURS:
        offload(blocks, HORIZON)
    if name == "offload_wrapper":
        model.layers = nn.ModuleList(map(offload_wrapper, blocks))
    try:
        yield (lambda: save_on_cpu(pin_memory=True)) if name == "save_on_cpu" else contextlib.nullcontext
    finally:
        model.layers = nn.ModuleList(blocks)
        for block in blocks:
            del block.forward  # that of its class again
        gc.collect()
        accelerator.empty_cache(next(model.parameters()).device)


def walk(model: Llama, tokens: torch.Tensor, surround: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
    """A forward and a backward pass; returns the loss."""
    with surround():
        loss = model(tokens, labels=tokens)
    (loss / tokens.numel()).backward()
    return float(loss.detach())


def built(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Llama:
    with torch.device("meta"):
        model = Llama(spec)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model


def compare(model: Llama, lengths: Sequence[int], turns: int) -> tuple[list[Row], list[Check]]:
    """A row for each length and way; the first turn does not count."""
    device, rows, checks = next(model.parameters()).device, list[Row](), list[Check]()
    ways = (KEPT, OURS, *PEERS)
    for length in lengths:
        tokens = torch.arange(length, device=device)[None] % model.spec.vocab_size
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks = dict.fromkeys(ways, 0)
        gradients: dict[str, torch.Tensor] = {}
        for turn in range(turns + 1):
            for name in ways if turn % 2 else reversed(ways):
                with way_of(name, model) as surround:
                    model.zero_grad(set_to_none=False)
                    walk(model, tokens, surround)  # buffers are made, and gradients
                    model.zero_grad(set_to_none=False)
                    accelerator.synchronize(device)
                    accelerator.reset_peak_memory(device)
                    before = accelerator.peak_memory(device)
                    begun = time.perf_counter()
                    walk(model, tokens, surround)
                    accelerator.synchronize(device)
                    taken, added = time.perf_counter() - begun, accelerator.peak_memory(device) - before
                    gradient = model.layers[0].get_parameter("attention_norm.weight").grad
                    if name == "offload_wrapper":
                        gradient = next(iter(model.layers[0].parameters())).grad
                assert gradient is not None
                gradients[name] = gradient.clone()
                if turn:
                    seconds[name].append(taken)
                    peaks[name] = max(peaks[name], added)
        for name in ways:
            low, middle, high = spread([own / kept for own, kept in zip(seconds[name], seconds[KEPT], strict=True)])
            rows.append(
                {
                    "tokens": length,
                    "inputs of blocks": name,
                    "peak of a pass, GiB": None if device.type == "cpu" else peaks[name] / 2**30,
                    "pass, s": statistics.median(seconds[name]),
                    "time over kept": middle,
                    "quartiles": f"{low:.3f} .. {high:.3f}",
                    "same gradients": torch.equal(gradients[name], gradients[KEPT]),
                }
            )
        checks += _claims(length, rows[-len(ways) :], seconds, peaks)
    return rows, checks


def _claims(
    length: int, rows: Sequence[Row], seconds: dict[str, list[float]], peaks: dict[str, int]
) -> Iterator[Check]:
    ours = next(row for row in rows if row["inputs of blocks"] == OURS)
    yield at_least(f"{length} tokens: the same gradients bit for bit", float(ours["same gradients"]), 1.0)
    if ours["peak of a pass, GiB"] is not None:
        yield at_most(f"{length} tokens: peak over kept", peaks[OURS] / peaks[KEPT], 0.5)
    yield at_most(f"{length} tokens: time over kept", ours["time over kept"], 1.01)
    for peer in PEERS:
        ratios = [own / theirs for own, theirs in zip(seconds[OURS], seconds[peer], strict=True)]
        yield at_most(f"{length} tokens: time over {peer}", statistics.median(ratios), 1.0)


def longest(model: Llama, name: str, first: int) -> int:
    """The longest row, in steps of a quarter, that a pass takes before memory runs out; 0 if not even the first."""
    device, length, found = next(model.parameters()).device, first, 0
    while True:
        try:
            with way_of(name, model) as surround:
                walk(model, torch.arange(length, device=device)[None] % model.spec.vocab_size, surround)
                accelerator.synchronize(device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            model.zero_grad(set_to_none=False)
            return found
        found, length = length, int(length * LONGER) // 1024 * 1024


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; the exit code is 0 when it ran, whatever holds, and when there is nothing to run it on."""
    given = options((__doc__ or "").splitlines()[0]).parse_args(arguments)
    devices = accelerator.list_devices()
    if not devices:
        print("offload: there is no accelerator on this machine, and on a CPU offload has nothing to gain; not run")
        return
    device = torch.device(devices[0])
    accelerator.set_device(device, accelerator.host_cores())
    spec = replace(PRESETS["llama-3-8b"], max_seq_len=1 << 21)
    model = built(spec, device, torch.bfloat16)
    rows, checks = compare(model, LENGTHS[:1] if given.quick else LENGTHS, turns=3 if given.quick else 5)
    if not given.quick:
        found = {name: longest(model, name, LENGTHS[-1]) for name in (KEPT, OURS)}
        rows += [{"inputs of blocks": name, "longest row, tokens": length} for name, length in found.items()]
        checks.append(at_least("longest row over kept", found[OURS] / max(1, found[KEPT]), 1.0))
    report(
        result("offload", machine(accelerator.get_device_name(device), torch.get_num_threads()), rows, checks),
        given.json,
    )


if __name__ == "__main__":
    main()
