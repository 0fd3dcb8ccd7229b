"""Does the layout change what a mixture of experts learns? transformers' Trainer, an accelerate loop and Phalanx.

    python3 benchmarks/layout_audit.py [--quick] [--json FILE]

One tiny Mixtral with its load-balancing loss is trained on a CPU in float64, each step on the same 8 sequences, which
are divided over ranks and micro-batches in several ways. Each trainer is compared with itself on one rank with the
whole batch at once: the gradient of the routers in the first step, and the cross-entropy of held-back sequences after
the last. All sequences have the same number of labels and there is no dropout, so that nothing else can differ.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from phalanx.checkpoint.disk.load import Checkpoint, step_folder
from phalanx.core.run_paths import RunPaths
from phalanx.trainer.export import export_run

ROWS, LENGTH, VOCABULARY = 8, 32, 300
LR, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8
EXACT = 1e-9
# Ranks and micro-batches of each, of as many sequences.
LAYOUTS = ((1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2))
PEERS = ("trainer", "accelerate")
BALANCES = {
    "Phalanx, sequence": {"balance": "sequence", "over": "layer"},
    "Phalanx, step_before": {"balance": "step_before", "over": "model"},
}


def write_model(folder: Path) -> None:
    """The folder that all start from: weights larger than at the start of training, so that loads are uneven."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.1, output_router_logits=True, router_aux_loss_coef=0.02, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).double().save_pretrained(folder)


def load_model(folder: Path) -> nn.Module:
    """transformers' model of a folder, in float64."""
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    return model


def sequences(count: int, seed: int) -> Tensor:
    """Tokens in which each tends to follow another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    for place in range(1, LENGTH):
        follows = torch.rand(count, generator=generator) < 0.6
        tokens[:, place] = torch.where(follows, tokens[:, place - 1] * 7 % VOCABULARY, tokens[:, place])
    return tokens


# ---------------------------------------------------------------------------------------------------------------- peers


def router_moments(model: nn.Module, optimizer: Any) -> list[float]:
    """First moments of the routers: after one step 1 - beta1 times their gradient."""
    state = optimizer.state
    found = [
        state[each]["exp_avg"].flatten() for name, each in model.named_parameters() if name.endswith(".gate.weight")
    ]
    moments: list[float] = torch.cat(found).tolist()
    return moments


def held_back_loss(model: nn.Module) -> float:
    """Cross-entropy of sequences that were not trained on."""
    tokens = sequences(16, seed=99)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def train_with_trainer(folder: Path, steps: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    """A rank of transformers' Trainer."""
    import transformers

    found: dict[str, Any] = {}

    class Note(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 1:
                inner = getattr(given["optimizer"], "optimizer", given["optimizer"])
                found["routers"] = router_moments(getattr(given["model"], "module", given["model"]), inner)

    data = [{"input_ids": row, "labels": row} for row in sequences(ROWS * steps, seed=1)]
    model = load_model(folder)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder.with_suffix(".trainer")), max_steps=steps, gradient_accumulation_steps=micro_batches,
        per_device_train_batch_size=ROWS // (ranks * micro_batches), learning_rate=LR, adam_beta1=BETAS[0],
        adam_beta2=BETAS[1], adam_epsilon=EPS, weight_decay=0.0, max_grad_norm=0.0, lr_scheduler_type="constant",
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Note()])
    trainer.train()
    return found | {"loss": held_back_loss(model.eval())}


def train_with_accelerate(folder: Path, steps: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    """A rank of the loop of accelerate's documentation on gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    rows: Any = sequences(ROWS * steps, seed=1)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=ROWS // (ranks * micro_batches))
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found: dict[str, Any] = {}
    for done, tokens in enumerate(loader, start=1):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        if done == micro_batches:
            found["routers"] = router_moments(model, getattr(optimizer, "optimizer", optimizer))
    return found | {"loss": held_back_loss(model.eval())}


def run_rank(folder: Path, steps: int, ranks: int, out: Path) -> None:
    """A rank of both, one after the other, in all layouts of so many ranks; the first writes what they find."""
    from accelerate.state import AcceleratorState, GradientState

    found: dict[str, dict[str, Any]] = {}
    for name, train in (("trainer", train_with_trainer), ("accelerate", train_with_accelerate)):
        for micro_batches in (each for of, each in LAYOUTS if of == ranks):
            AcceleratorState._reset_state()
            GradientState._reset_state()
            found.setdefault(name, {})[str(micro_batches)] = train(folder, steps, ranks, micro_batches)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(found))


def run_peers(folder: Path, steps: int, quick: bool, work: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """What the peers find: by trainer, then by layout, that of one rank and one micro-batch first."""
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in PEERS}
    for ranks in (1, 2) if quick else (1, 2, 4):
        out = work / f"peers-{ranks}.json"
        words = [str(Path(__file__).resolve()), "--rank", str(folder), str(steps), str(ranks), str(out)]
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        _run([sys.executable, *start, *words])
        for name, layouts in json.loads(out.read_text()).items():
            found[name] |= {f"{ranks} x {micro_batches}": each for micro_batches, each in layouts.items()}
    return found


def _run(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


# -------------------------------------------------------------------------------------------------------------- Phalanx


def run_phalanx(
    folder: Path, steps: int, shares: list[int], micro_batch: int, balance: dict[str, str], work: Path
) -> dict[str, Any]:
    """The same of a run of Phalanx, whose text is another: it is compared with itself alone."""
    ranks, run = len(shares), work / f"phalanx-{balance['balance']}-{'-'.join(map(str, shares))}-{micro_batch}"
    keys = {
        "model.from_hf": folder, "data.seq_len": LENGTH, "data.tokenizer": "train", "data.tokenizer_vocab": VOCABULARY,
        "data.cache": work / "cache", "train.steps": steps, "train.global_batch": ROWS, "train.dtype": "fp64",
        "train.micro_batch": micro_batch, "train.eval_sequences": 0, "optim.lr": LR, "optim.weight_decay": 0.0,
        "optim.clip_norm": "null", "optim.schedule": "constant", "balance.batch": json.dumps(shares),
        "checkpoint.every": 1, "checkpoint.keep": steps + 1, "resilience.in_memory_checkpoints": "false",
    } | {f"model.moe.{key}": value for key, value in balance.items()}  # fmt: skip
    recipe = work / "recipe.yaml"
    recipe.write_text("{}\n")
    given = [f"{key}={value}" for key, value in keys.items()]
    _run([sys.executable, "-m", "phalanx", "train", str(recipe), "--run-dir", str(run), "--ranks", str(ranks), *given])
    export_run(RunPaths(run), run / "export", "fp64", note=False)
    return {"routers": _saved_moments(run), "loss": held_back_loss(load_model(run / "export"))}


def _saved_moments(run: Path) -> list[float]:
    checkpoint = Checkpoint(step_folder(RunPaths(run).checkpoints, 1))
    moments: list[float] = []
    for name, (shape, _) in checkpoint.parameters.items():
        if name.endswith(".router.weight"):
            out = torch.empty(torch.Size(shape).numel(), dtype=torch.float64)
            checkpoint.read_into(name, "exp_avg", 0, out.numel(), out)
            moments += out.tolist()
    checkpoint.close()
    return moments


# ----------------------------------------------------------------------------------------------------------- comparison


def run_layouts(name: str, folder: Path, steps: int, quick: bool, work: Path) -> dict[str, dict[str, Any]]:
    """What Phalanx finds, by layout, one rank with the whole batch first."""
    found = {}
    for ranks, micro_batches in LAYOUTS[:4] if quick else LAYOUTS:
        shares, each = [ROWS // ranks] * ranks, ROWS // (ranks * micro_batches)
        found[f"{ranks} x {micro_batches}"] = run_phalanx(folder, steps, shares, each, BALANCES[name], work)
    return found | {"5 + 2 + 1": run_phalanx(folder, steps, [5, 2, 1], 2, BALANCES[name], work)}


def compare(name: str, layouts: dict[str, dict[str, Any]]) -> list[Row]:
    """Rows of the table: how far each layout is from the first."""
    (_, first), *others = layouts.items()
    rows: list[Row] = []
    for called, found in others:
        mine, whole = (torch.tensor(each["routers"], dtype=torch.float64) for each in (found, first))
        rows.append(
            {
                "trainer": name,
                "ranks x micro-batches": called,
                "router gradient off by": float((mine - whole).norm() / whole.norm()),
                "loss after the last step off by": abs(found["loss"] - first["loss"]) / first["loss"],
            }
        )
    return rows


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        folder, steps, ranks, out = sys.argv[2:]
        run_rank(Path(folder), int(steps), int(ranks), Path(out))
        return
    asked = options(__doc__.splitlines()[0]).parse_args()
    most = 5 if asked.quick else 50
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        write_model(work / "model")
        for name, layouts in run_peers(work / "model", most, asked.quick, work).items():
            rows += compare(name, layouts)
        for name in BALANCES:
            rows += compare(name, run_layouts(name, work / "model", most, asked.quick, work))
    checks: list[Check] = []
    for name in (*PEERS, *BALANCES):
        gradient, loss = (
            max(row[key] for row in rows if row["trainer"] == name)
            for key in ("router gradient off by", "loss after the last step off by")
        )
        if name in PEERS:
            checks.append(at_least(f"{name}: the layout shows in the router gradient", gradient, 1e-3))
        else:
            checks.append(at_most(f"{name}: router gradient of any layout", gradient, EXACT))
            checks.append(at_most(f"{name}: loss after {most} steps", loss, EXACT))
    report(result("layout audit", machine(None, 1), rows, checks), asked.json)


if __name__ == "__main__":
    main()
