"""Mixture of experts: the grouped product, choices on any division, training beside transformers, and memory of an
import. Experts that are divided over ranks: divided_experts.py.

    python3 benchmarks/experts.py [--quick] [--json FILE] [--only PART]

Products: forward and backward passes of our operator, of `torch.nn.functional.grouped_mm`, and of a loop over groups,
in turns. Choices: the experts that one forward pass in float32 chooses for rows of another micro-batch. Training: steps
of an OLMoE by Phalanx's own loop and by a plain loop over transformers' model, with each way that it has to run
experts. Import: memory that reading a Mixtral of 8 experts adds to what is kept.
"""

import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.convert import Added
from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from benchmarks.peers import Case, Plain, batches_of, phalanx, transformers_loss, weights, write_tokens
from phalanx.layout.model_shape import ModelSpec, MoESpec
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.grouped_mm import multiply_groups
from phalanx.models.hf_config import config_from_spec
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import Weights
from phalanx.models.moe import MoEDecoder
from phalanx.models.router import Router
from phalanx.models.user_model import load_family_class

PARTS = ("products", "choices", "training", "import")
SHAPES = ((8, 1024, 256, 512), (64, 2048, 256, 128), (128, 512, 128, 64))  # groups, rows, inputs, outputs
AS_FAST, NO_SLOWER, FLIPS, CHOICES = 0.97, 1.0, 1e-6, 10_000_000
EXPERTS = MoESpec(experts=32, experts_per_token=4, intermediate=256, balance="none")
OLMOE = ModelSpec(
    architecture="olmoe", vocab_size=4096, hidden=256, layers=4, heads=4, kv_heads=4, head_dim=64, intermediate=256,
    max_seq_len=512, moe=EXPERTS,
)  # fmt: skip
MIXTRAL = ModelSpec(
    architecture="mixtral", vocab_size=32_000, hidden=2048, layers=8, heads=16, kv_heads=4, head_dim=128,
    intermediate=7168, max_seq_len=512, moe=MoESpec(experts=8, experts_per_token=2, intermediate=7168),
)  # fmt: skip
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
HOPELESS = 10  # times as long as ours
SHARD_BYTES = 500_000_000


# ------------------------------------------------------------------------------------------------------------ products


def loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A product a group; `unbind`, since indexing would make a whole gradient of the stack for each."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix.T for part, matrix in zip(x.split(counts), weight.unbind(0), strict=True)])


def torch_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's own operator."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))


def compare_products(quick: bool) -> tuple[list[Row], list[Check]]:
    """A row a shape and type: milliseconds of the three ways, forward and backward."""
    ways = {"ours": multiply_groups, "grouped_mm": torch_grouped, "loop": loop}
    rows: list[Row] = []
    checks: list[Check] = []
    for dtype in (torch.float32, torch.bfloat16):
        for groups, count, into, out in SHAPES:
            torch.manual_seed(0)
            x = torch.randn(count, into, dtype=dtype, requires_grad=True)
            weight = torch.randn(groups, out, into, dtype=dtype, requires_grad=True)
            ends = torch.bincount(torch.randint(groups, (count,)), minlength=groups).cumsum(0)
            grad = torch.randn(count, out, dtype=dtype)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(4 if quick else 61):
                # In any order: who always follows the loop finds the caches as it leaves them.
                for way in random.sample(list(ways), len(ways)):
                    begun = time.perf_counter()
                    torch.autograd.grad(ways[way](x, weight, ends), (x, weight), grad)
                    times[way].append(time.perf_counter() - begun)
            name = f"{str(dtype).removeprefix('torch.')} {groups, count, into, out}"
            took = {way: times[way][1:] for way in ways}
            best = min(("grouped_mm", "loop"), key=lambda way: statistics.median(took[way]))
            ratio = statistics.median(other / own for other, own in zip(took[best], took["ours"], strict=True))
            rows.append({"what": name} | {f"{way}, ms": 1e3 * statistics.median(took[way]) for way in ways})
            checks.append(at_least(f"{name}: speed over the faster", ratio, AS_FAST))
    return rows, checks


# ------------------------------------------------------------------------------------------------------------- choices


def compare_choices(quick: bool) -> tuple[list[Row], list[Check]]:
    """How many choices of 16 rows at once are others in micro-batches of 1, 5 and 10."""
    spec = replace(OLMOE, moe=replace(EXPERTS, experts_per_token=8))
    model = MoEDecoder(spec)
    model.load_state_dict(dict(weights(spec, torch.device("cpu"))))
    chosen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, found: chosen.append(found[1].sort(-1).values))

    def choose(parts: list[Tensor]) -> list[Tensor]:
        """By layer, of all tokens in order."""
        by_part = []
        for part in parts:
            chosen.clear()
            model(part)
            by_part.append(list(chosen))
        return [torch.cat(layer) for layer in zip(*by_part, strict=True)]

    generator = torch.Generator().manual_seed(0)
    made = flipped = 0
    with torch.no_grad():
        while made < (CHOICES // 20 if quick else CHOICES):
            rows = torch.randint(spec.vocab_size, (16, spec.max_seq_len), generator=generator)
            for whole, parts in zip(choose([rows]), choose(list(rows.split([1, 5, 10]))), strict=True):
                made += whole.numel()
                flipped += int((whole != parts).any(-1).sum())
    row = {"what": "choices in float32, 16 rows or 1, 5 and 10", "choices": made, "tokens that choose others": flipped}
    return [row], [at_most("share of choices that are others", flipped / made, FLIPS)]


# ------------------------------------------------------------------------------------------------------------ training


def transformers_olmoe(spec: ModelSpec, implementation: str) -> nn.Module:
    """transformers' model of the same shape; weights are its own, since only speed is compared."""
    import transformers

    config = transformers.OlmoeConfig.from_dict(config_from_spec(spec, torch.float32))
    config.use_cache, config._attn_implementation = False, "sdpa"
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    return model


def compare_training(quick: bool) -> tuple[list[Row], list[Check]]:
    """Tokens a second of each, in turns; of one that is hopelessly slow, those of the first."""
    case = Case(OLMOE, 256, 4, 4, "fp32", False, torch.device("cpu"))
    turns, block = (2, 1) if quick else (9, 3)
    steps = (turns + 1) * block
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as scratch:
        tokens = write_tokens(Path(scratch, "tokens"), OLMOE.vocab_size, steps * case.tokens + 1)
        batch = batches_of(case, tokens)
        batches = [batch(step) for step in range(steps)]
        with phalanx(case, tokens, Path(scratch, "run")) as ours:
            peers: list[Any] = [ours]
            for name in IMPLEMENTATIONS:
                model = transformers_olmoe(OLMOE, name)
                peers.append(Plain(f"transformers, {name}", model, transformers_loss, case, batches))
            times: dict[str, list[float]] = {peer.name: [] for peer in peers}
            for turn in range(turns + 1):
                for peer in (peers * 2)[turn % len(peers) : turn % len(peers) + len(peers)]:
                    if turn > 0 and times[peer.name][0] > HOPELESS * times[ours.name][0]:
                        continue
                    begun = time.perf_counter()
                    peer.run(block)
                    times[peer.name].append((time.perf_counter() - begun) / block)
    took = {name: values[1:] or values for name, values in times.items()}
    fastest = min((name for name in took if name != ours.name), key=lambda name: statistics.median(took[name]))
    ratio = statistics.median(other / own for other, own in zip(took[fastest], took[ours.name], strict=True))
    rows = [
        {"what": f"training by {name}", "tokens/s": case.tokens / statistics.median(values)}
        for name, values in took.items()
    ]
    return rows, [at_least(f"speed over {fastest}", ratio, NO_SLOWER)]


# -------------------------------------------------------------------------------------------------------------- import


def measure_import(quick: bool) -> tuple[list[Row], list[Check]]:
    """Memory of reading a folder in files of 0.5 GB, beside the parameters themselves."""
    spec = replace(MIXTRAL, layers=1) if quick else MIXTRAL
    code = load_family_class(spec.architecture)
    shapes = parameter_shapes(spec)
    values = torch.randn(max(math.prod(shape) for shape in shapes.values()), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as scratch:
        folder = Path(scratch, "model")
        export(
            folder, spec, lambda name: values[: math.prod(shapes[name])].view(shapes[name]), torch.bfloat16,
            max_shard_bytes=SHARD_BYTES, model_class=code,
        )  # fmt: skip
        file = max(path.stat().st_size for path in folder.glob("*.safetensors"))
        kept = {name: torch.zeros(math.prod(shape), dtype=torch.bfloat16) for name, shape in shapes.items()}
        found = Weights(folder, code)
        found.check(spec)
        begun = time.perf_counter()
        with Added() as memory:
            for name, out in kept.items():
                found.read_into(name, 0, out.numel(), out)
            seconds = time.perf_counter() - begun
    size = 2e-9 * sum(math.prod(shape) for shape in shapes.values())
    row = {"what": "import of 8 experts", "GB": size, "GB/s": size / seconds, "memory added, GB": memory.bytes / 1e9}
    return [row], [at_most("memory added, GB: one file's size", memory.bytes / 1e9, file / 1e9)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[bool], tuple[list[Row], list[Check]]]] = dict(
        zip(
            PARTS,
            (compare_products, compare_choices, compare_training, measure_import),
            strict=True,
        )
    )
    torch.set_num_threads(1)
    checks: list[Check] = []
    rows: list[Row] = []
    for name, measure in parts.items():
        if arguments.only in (None, name):
            found, held = measure(arguments.quick)
            rows += found
            checks += held
    report(result("experts", machine(None, torch.get_num_threads()), rows, checks), arguments.json)


if __name__ == "__main__":
    main()
