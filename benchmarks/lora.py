"""Adapters beside frozen weights: Phalanx beside PEFT under transformers.Trainer, in turns and in one call.

    python3 benchmarks/lora.py [--quick] [--json FILE]

Both train the same adapters of all seven matrices, from the same values, on the same tokens, with activations
recomputed. With an accelerator: the shape of Llama 3 8B, its weights drawn and frozen in bf16, rows of 2048 tokens, one
at a time; the memory of each is its own peak, without what the other holds. Without one: a small model in fp32, to
compare speeds.
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result, spread
from benchmarks.peers import SEED, Case, batches_of, drive_trainer, phalanx, synchronise, write_tokens
from phalanx.layout.model_shape import LORA_TARGETS, LoraSpec, ModelSpec
from phalanx.models.families.catalog import PRESETS, parameter_count, parameter_shapes
from phalanx.models.hf_config import config_from_spec
from phalanx.models.llama import init_slice
from phalanx.models.lora import adapter_names, init_adapter_slice
from phalanx.models.user_model import hf_name
from phalanx.system import accelerator

LORA = LoraSpec(rank=16, alpha=32.0, targets=LORA_TARGETS)
SMALL = ModelSpec(
    vocab_size=8192, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, intermediate=1408, max_seq_len=512
)
CARD_GIB = 22.4  # what a card of 24 GB has
LOSS_BETWEEN_TYPES = 5e-2  # bf16 of two libraries, relative


def peft_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """transformers' model with PEFT's adapters: the values that Phalanx starts from, activations recomputed."""
    import transformers
    from peft import LoraConfig, get_peft_model

    plain = replace(spec, lora=None)
    config = transformers.LlamaConfig.from_dict(config_from_spec(plain, dtype))
    config.use_cache = False
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            base = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, shape in parameter_shapes(plain).items():
            elements = torch.Size(shape).numel()
            values = init_slice(plain, SEED, name, 0, elements, device, torch.float32)
            base.get_parameter(hf_name(name)).copy_(values.view(shape))
    modules = [f"{target}_proj" for target in LORA_TARGETS]
    chosen = LoraConfig(
        r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, chosen)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for matrix, a, _ in adapter_names(LORA, spec.layers):
            theirs = f"base_model.model.{hf_name(matrix).removesuffix('.weight')}.lora_A.default.weight"
            parameter = parameters[theirs]
            shape = (parameter.shape[0], parameter.shape[1])
            values = init_adapter_slice(SEED, a, 0, parameter.numel(), shape, device, torch.float32)
            parameter.copy_(values.view(shape))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    return model


@dataclass
class Turn:
    """What a step took, and the most bytes that were held meanwhile."""

    step_s: float
    peak_bytes: int


class Clock:
    """Times turns and, on an accelerator, what is held at their height."""

    def __init__(self, device: torch.device, block: int) -> None:
        self.device, self.block = device, block
        self.start()

    def start(self) -> None:
        accelerator.reset_peak_memory(self.device)
        self.began = time.perf_counter()

    def stop(self) -> Turn:
        synchronise(self.device)
        return Turn((time.perf_counter() - self.began) / self.block, accelerator.peak_memory(self.device))


def held(device: torch.device) -> int:
    """Bytes that are allocated now; 0 on a CPU, where nobody counts them apart."""
    if device.type == "cpu":
        return 0
    accelerator.reset_peak_memory(device)
    return accelerator.peak_memory(device)


def compare(case: Case, cycles: int, block: int) -> tuple[list[Row], list[Check]]:
    """Both in turns of `block` steps; the first turn does not count."""
    steps = (cycles + 1) * block
    turns: dict[str, list[Turn]] = {"PEFT + Trainer": [], "Phalanx": []}
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as scratch:
        tokens = write_tokens(Path(scratch, "tokens"), case.spec.vocab_size, steps * case.tokens + 1)
        batch = batches_of(case, tokens)
        batches: list[tuple[Tensor, Tensor]] = [batch(step) for step in range(steps)]
        dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
        model = peft_model(case.spec, case.device, dtype)
        theirs = held(case.device)
        with phalanx(case, tokens, Path(scratch, "run")) as ours:
            mine = held(case.device) - theirs
            clock = Clock(case.device, block)

            def turn() -> bool:
                turns["PEFT + Trainer"].append(clock.stop())
                clock.start()
                ours.run(block)
                turns["Phalanx"].append(clock.stop())
                clock.start()
                return len(turns["Phalanx"]) <= cycles

            losses = {"PEFT + Trainer": drive_trainer(case, batches, Path(scratch, "hf"), block, turn, model)}
            losses["Phalanx"] = ours.losses()
    return compared(case, turns, losses, {"PEFT + Trainer": mine, "Phalanx": theirs})


def compared(
    case: Case, turns: dict[str, list[Turn]], losses: dict[str, list[float]], others_bytes: dict[str, int]
) -> tuple[list[Row], list[Check]]:
    """A row each, and what is claimed."""
    on_host = case.device.type == "cpu"
    rows: list[Row] = []
    peaks: dict[str, float] = {}
    for name, all_turns in turns.items():
        took = all_turns[1:]
        ratios = [their.step_s / own.step_s for their, own in zip(took, turns["Phalanx"][1:], strict=True)]
        low, middle, high = spread(ratios)
        step_s = statistics.median(one.step_s for one in took)
        # In the first turn Trainer is still getting ready, and the other has not made its gradients yet.
        peaks[name] = (max(one.peak_bytes for one in took) - others_bytes[name]) / 2**30
        rows.append(
            {
                "trained by": name,
                "parameters, M": round(parameter_count(replace(case.spec, lora=None)) / 1e6),
                "dtype": case.dtype,
                "tokens a step": case.tokens,
                "step, s": step_s,
                "tokens/s": case.tokens / step_s,
                "Phalanx's speed over it": middle,
                "quartiles": f"{low:.3f} .. {high:.3f}",
                "peak memory, GiB": None if on_host else peaks[name],
            }
        )
    # Trainer's losses come a micro-batch at a time, divided by their number already.
    parts = len(losses["PEFT + Trainer"]) // len(losses["Phalanx"])
    theirs = [sum(losses["PEFT + Trainer"][i * parts : (i + 1) * parts]) for i in range(len(losses["Phalanx"]))]
    apart = max(abs(one - other) / abs(other) for one, other in zip(theirs, losses["Phalanx"], strict=True))
    checks = [
        at_most("largest relative difference of a loss", apart, 1e-4 if on_host else LOSS_BETWEEN_TYPES),
        at_least("speed over PEFT + Trainer", rows[0]["Phalanx's speed over it"], 1.0),
    ]
    if not on_host:
        checks.append(at_most("peak memory, GiB: fits a card of 24 GB", peaks["Phalanx"], CARD_GIB))
    return rows, checks


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; the exit code is 0 when it ran, whatever holds."""
    parser = options((__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: leave an accelerator alone")
    given = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process: its groups need no network
    devices = accelerator.list_devices() if given.device == "auto" else []
    device = torch.device(devices[0] if devices else "cpu")
    accelerator.set_device(device, accelerator.host_cores())
    if device.type == "cpu":
        case = Case(replace(SMALL, lora=LORA), 512, 1, 2, "fp32", False, device, "full")
        rows, checks = compare(case, cycles=6 if given.quick else 30, block=1)
    else:
        layers = 8 if given.quick else PRESETS["llama-3-8b"].layers
        spec = replace(PRESETS["llama-3-8b"], lora=LORA, layers=layers)
        case = Case(spec, 2048, 1, 4, "bf16", True, device, "full")
        rows, checks = compare(case, cycles=3 if given.quick else 8, block=2)
        gc.collect()
    chip = accelerator.get_device_name(device) if devices else None
    report(result("lora", machine(chip, torch.get_num_threads()), rows, checks), given.json)


if __name__ == "__main__":
    main()
