"""The whole life of a run in a few minutes on two CPU cores: train, lose a rank, go on, evaluate, export, generate.

`make demo` runs it. Everything is done by the same commands that a user would type; the kill is a real SIGKILL.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from phalanx.records import Kind, RunPaths, read_lines, read_steps

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path("recipes/demo.yaml")
RUN = Path("runs/demo")
EXPORT = Path("runs/demo-export")
PROMPT = "def read("
VICTIM = 1
# The demo's small products run on two ranks of one thread each: the two cores that the demo asks for.
TRAIN = ["train", str(RECIPE), "--ranks", "2", "--run-dir", str(RUN)]


def main() -> None:
    os.chdir(ROOT)
    overrides = sys.argv[1:]
    for folder in (RUN, EXPORT):  # what an earlier demo left
        shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    say("1. train on two ranks; half-way, one of them is killed with SIGKILL")
    train(overrides)
    say("2. export to a Hugging Face folder")
    phalanx("export", str(RUN), str(EXPORT))
    say("3. load that folder with transformers and write some text")
    generate()
    phalanx("report", str(RUN), quiet=True)
    say(f"done in {time.monotonic() - began:.0f} s; everything is here:")
    newest = max((ROOT / RUN / "checkpoints").glob("step-*"))
    for name, path in (("run", RUN), ("checkpoint", newest), ("export", EXPORT), ("report", RunPaths(RUN).report)):
        print(f"  {name:11}{(ROOT / path).resolve()}")


def train(overrides: list[str]) -> None:
    """Train, and meanwhile wait for the middle of the run to kill a rank."""
    command = [*TRAIN, *overrides]
    print("$ phalanx " + " ".join(command), flush=True)
    run = subprocess.Popen([sys.executable, "-m", "phalanx", *command])
    killed = False
    while run.poll() is None:
        time.sleep(0.05)
        if not killed and (pid := victim()) is not None:
            os.kill(pid, signal.SIGKILL)
            killed = True
    if run.returncode != 0 or not killed:
        sys.exit(f"the training run ended with exit code {run.returncode}{'' if killed else ', before the kill'}")


def victim() -> int | None:
    """The process to kill, once half of the steps are done; None before."""
    paths = RunPaths(RUN)
    started = [event for event in read_lines(paths.events) if event["kind"] == Kind.RUN_STARTED]
    attempts = [event for event in read_lines(paths.events) if event["kind"] == Kind.ATTEMPT_STARTED]
    steps = read_steps(paths.metrics)
    if not started or not attempts or not steps or steps[-1]["step"] < started[0]["steps"] // 2:
        return None
    return int(attempts[-1]["pids"][str(VICTIM)])


def generate() -> None:
    """What anyone does with a Hugging Face folder; nothing of Phalanx is needed for it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXPORT)
    model = AutoModelForCausalLM.from_pretrained(EXPORT)
    print(f"loaded {type(model).__name__} with {model.num_parameters():,} parameters and {type(tokenizer).__name__}")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    written = model.generate(
        **inputs, max_new_tokens=80, do_sample=True, temperature=0.7, pad_token_id=tokenizer.eos_token_id
    )
    text = tokenizer.decode(written[0], skip_special_tokens=True)
    print("\n".join(f"  | {line}" for line in text.splitlines()))


def phalanx(*arguments: str, quiet: bool = False) -> None:
    if not quiet:
        print("$ phalanx " + " ".join(arguments), flush=True)
    subprocess.run(
        [sys.executable, "-m", "phalanx", *arguments], check=True, stdout=subprocess.DEVNULL if quiet else None
    )


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
