"""One recipe on five clusters: five loss curves, which should be one, beside what the usual mistake makes of it.

    python3 benchmarks/one_curve.py [--quick] [--json FILE] [--html FILE] [--svg FILE]

A small LLaMA with dropout learns the answers to prompts, in float64: on one rank; on two ranks with CPU quotas of 3:1,
which share the work by their speeds; on four that hold 4:2:1:0 parts of the optimizer's state; cut into two tensor
slices and two stages; and on two nodes, one of which is killed and comes back, while ranks are killed as well. Each is
`phalanx train`, as a user starts it. The control is a plain loop that does what data-parallel scripts often do: equal
shares, the mean over each rank's own tokens, and the mean of these means. Answers are of unlike lengths, so it trains
something else. `--html` and `--svg` draw them all.
"""

import functools
import inspect
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Check, Row, at_least, at_most, machine, options, report, result
from benchmarks.pictures import draw_curves
from benchmarks.started import Command, Run, start
from benchmarks.throttle import LEAST, throttle
from phalanx.core.records import read_steps
from phalanx.core.run_paths import RunPaths

RECIPE = """
model: {{hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 64, dropout: 0.1}}
data: {{source: answers.jsonl, format: prompt, tokenizer_vocab: 512, seq_len: 64, held_out: 0.05, cache: cache}}
train: {{steps: {steps}, global_batch: 16, micro_batch: 2, dtype: fp64, compile: false, eval_sequences: 0}}
optim: {{lr: 3e-3, warmup_steps: 5, decay_steps: {steps}, min_lr_ratio: 0.0}}
checkpoint: {{every: 10, keep: 2}}
comm: {{timeout_s: 60}}
report: {{tensorboard: false}}
"""
SPLIT = 4  # ranks of the control
SAME = 1e-9  # relative: losses of two runs in float64 that do the same
APART = 1e-4  # what a wrong weight changes at least
PREPARED, PLAIN = "one rank", "plain PyTorch loop"
WRONG = f"control: mean of {SPLIT} ranks' means"


class Started(Run):
    """One of the commands of a run: the first of its nodes, or another one."""

    def __init__(self, paths: RunPaths, command: Command) -> None:
        super().__init__(paths, {0: command})
        self.command = command

    def step(self) -> int:
        return max((record["step"] for record in read_steps(self.paths.metrics)), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        self.wait(condition, look_s=0.01)

    def ranks(self) -> list[int]:
        """The processes of this node that train, in order of rank."""
        return [pid for _, pid in sorted(self.command.ranks().items())]

    def finish(self) -> None:
        self.wait(self.command.over)
        assert self.command.code == 0, self.command.said()


@dataclass
class Place:
    """Where all runs lie, and how many steps each has."""

    folder: Path
    steps: int
    started: list[Started] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> Started:
        run = self.folder / name.replace(" ", "-")
        words = ["-m", "phalanx", "train", "recipe.yaml", *arguments, "--run-dir", str(run)]
        said = self.folder / f"{run.name}-{len(self.started)}.txt"
        self.started.append(Started(RunPaths(run), start(words, self.folder, said, warm=False)))
        return self.started[-1]

    def stop(self) -> None:
        """Leave no process behind."""
        for each in self.started:
            each.command.end()


def write_answers(file: Path, most: int = 600) -> None:
    """Prompts with answers of very different lengths: what functions of Python's own library are, and say of
    themselves."""
    import argparse
    import collections
    import decimal
    import email.message
    import logging
    import tarfile
    import threading
    import zipfile

    lines = []
    for module in (os, argparse, collections, decimal, email.message, logging, tarfile, threading, zipfile, inspect):
        for name, value in sorted(vars(module).items()):
            members = sorted(vars(value).items()) if inspect.isclass(value) else [(name, value)]
            for inner, member in members:
                text = inspect.getdoc(member) if callable(member) else None
                if text:
                    lines.append(json.dumps({"prompt": f"{name}.{inner}?", "completion": text[:400]}))
    assert len(lines) >= most, f"only {len(lines)} functions say what they do"
    file.write_text("\n".join(lines[:most]) + "\n")


# ------------------------------------------------------------------------------------------------------------ the runs


def plain(place: Place, name: str, *arguments: str) -> Started:
    """A run that nothing happens to."""
    run = place.start(name, *arguments)
    run.finish()
    return run


def unlike(place: Place, name: str) -> Started:
    """Two ranks, the second with a third of the first one's time."""
    with throttle(2) as limits:
        run = place.start(name, "--ranks", "2")
        run.until(lambda: len(run.ranks()) == 2)
        for rank, pid in enumerate(run.ranks()):
            limits.limit(rank, (0.9, 0.3)[rank])
            limits.enter(rank, pid)
        run.finish()
    return run


def disturbed(place: Place, name: str) -> Started:
    """Two nodes: a rank is killed, then a whole node, which comes back, then another rank."""
    meet = ["--nodes", "2", "--rendezvous", f"file://{place.folder}/meet", "--rendezvous-timeout", "60"]
    node = functools.partial(place.start, name, "--ranks", "2", *meet, "--node-rank")
    first, second = node("0"), node("1")
    at = [place.steps * part // 8 for part in (1, 2, 4, 6)]
    first.until(lambda: first.step() >= at[0])
    os.kill(second.ranks()[0], signal.SIGKILL)
    first.until(lambda: first.attempt() >= 2 and first.step() >= at[1])
    second.command.end()
    first.until(lambda: first.attempt() >= 3 and first.step() >= at[2])
    with throttle(2) as limits:
        for rank, pid in enumerate(first.ranks()):  # so that the run lasts until the node has come back
            limits.limit(rank, LEAST)
            limits.enter(rank, pid)
        second = node("1")
        first.until(lambda: first.attempt() >= 4)
    first.until(lambda: first.step() >= at[3])
    os.kill(first.ranks()[0], signal.SIGKILL)
    first.finish()
    second.finish()
    return first


def control(prepared: RunPaths, steps: int, split: int) -> list[float]:
    """The losses of a plain loop of `split` ranks, each of which averages over its own tokens. Reported is the right
    mean, so that it is the training that differs and not what is printed of it."""
    import torch
    import yaml

    from phalanx.config import load
    from phalanx.data.loader import Loader
    from phalanx.layout.balance import Division
    from phalanx.models.counter_rng import CounterRNG
    from phalanx.models.families.catalog import parameter_shapes
    from phalanx.models.llama import Llama, init_slice
    from phalanx.optim.lr_schedule import learning_rate
    from phalanx.workload.workload import make_workload, read_model_shape

    torch.set_num_threads(1)
    config = load.build_config(yaml.safe_load(prepared.config.read_text()), "the run's configuration")
    spec, optim = read_model_shape(config, prepared), config.optim
    (tokens,) = {file.parent for file in (prepared.root.parent / "cache").rglob("train/*.bin")}
    subject = make_workload(config, spec, prepared)
    model, task = Llama(spec).double(), subject.task()
    parameters = dict(model.named_parameters())
    for name, shape in parameter_shapes(spec).items():
        values = init_slice(spec, config.train.seed, name, 0, parameters[name].numel(), "cpu", torch.float64)
        parameters[name].data.copy_(values.view(shape))
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    rows = subject.train_data([(tokens, 1.0)])
    share = config.train.global_batch // split
    loaders = [Loader(rows, config.train.global_batch, config.train.seed, rank) for rank in range(split)]
    losses = []
    for step in range(1, steps + 1):
        total, weight = 0.0, 0
        for loader in loaders:
            samples = [each for part in loader.batches(step - 1, Division((share,) * split, 1)) for each in part]
            batch = task.collate(samples)
            loss_sum = task.loss_sum(model, batch, CounterRNG(config.train.seed, step, batch.samples))
            (loss_sum / max(batch.weight, 1) / split).backward()
            total, weight = total + float(loss_sum.detach()), weight + batch.weight
        torch.nn.utils.clip_grad_norm_(parameters.values(), optim.clip_norm or float("inf"))
        for group in adam.param_groups:
            group["lr"] = learning_rate(optim, step)
        adam.step()
        adam.zero_grad()
        losses.append(total / weight)
    return losses


# --------------------------------------------------------------------------------------------------------- the figures


def losses_of(run: Started) -> list[float]:
    return [record["loss"] for record in read_steps(run.paths.metrics)]


def apart(curve: list[float], other: list[float]) -> float:
    """The greatest relative difference of two curves."""
    assert len(curve) == len(other), f"curves of {len(curve)} and {len(other)} steps"
    return max(abs(one - two) / abs(two) for one, two in zip(curve, other, strict=True))


def draw(curves: dict[str, list[float]], file: Path) -> None:
    """All curves in one picture, and below it how far each is from the first."""
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.plotting import figure
    from bokeh.resources import INLINE

    title = "One recipe, five clusters, a plain loop and a control"
    size: dict[str, Any] = {"sizing_mode": "stretch_width", "min_border_left": 80, "tools": "box_zoom,reset,save"}
    losses = figure(title=f"{title}: loss", height=480, **size)
    beside = figure(
        title="relative difference to one rank", height=320, y_axis_type="log", x_range=losses.x_range, **size
    )
    beside.xaxis.axis_label = "step"
    # One colour for each way, told apart with weak colour vision as well (Okabe and Ito, 2008).
    colours = ("#000000", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00")
    first = next(iter(curves.values()))
    for (name, curve), colour in zip(curves.items(), colours, strict=True):
        steps = list(range(1, len(curve) + 1))
        line: dict[str, Any] = {
            "line_color": colour,
            "line_width": 2,
            "line_dash": "dashed" if name == WRONG else "solid",
        }
        losses.line(steps, curve, legend_label=name, **line)
        differences = [abs(one - two) / abs(two) or math.nan for one, two in zip(curve, first, strict=True)]
        beside.line(steps, differences, **line)
    losses.legend.click_policy = "hide"
    page = file_html(column(losses, beside, sizing_mode="stretch_width"), INLINE, title)
    file.write_text(page, encoding="utf-8")


def main() -> None:
    parser = options("One recipe on five clusters gives one loss curve; wrongly weighted it gives another.")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also draw the curves into this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the curves as a picture into this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-one-curve-") as name:
        place = Place(Path(name), 120 if given.quick else 300)
        (place.folder / "recipe.yaml").write_text(RECIPE.format(steps=place.steps))
        write_answers(place.folder / "answers.jsonl")
        ways: dict[str, Callable[[str], Started]] = {
            PREPARED: lambda way: plain(place, way, "--ranks", "1"),
            "quotas 3:1": functools.partial(unlike, place),
            "state 4:2:1:0": lambda way: plain(place, way, "--ranks", "4", "balance.optimizer_state=[4,2,1,0]"),
            "tensor 2 x pipeline 2": lambda way: plain(
                place, way, "--ranks", "4", "parallel.tensor=2", "parallel.pipeline=2"
            ),
            "kills, a shrink, a growth": functools.partial(disturbed, place),
        }
        try:
            runs = {way: run(way) for way, run in ways.items()}
        finally:
            place.stop()
        curves = {way: losses_of(run) for way, run in runs.items()}
        curves[PLAIN] = control(runs[PREPARED].paths, place.steps, 1)
        curves[WRONG] = control(runs[PREPARED].paths, place.steps, SPLIT)
        rows, checks = judge(runs, curves)
    if given.html is not None:
        draw(curves, given.html)
    if given.svg is not None:
        draw_curves({name: curve for name, curve in curves.items() if name != PLAIN}, WRONG, given.svg)
    report(result("one_curve", machine(None, 1), rows, checks), given.json)
    sys.exit(0 if all(check.holds for check in checks) else 1)


def judge(runs: dict[str, Started], curves: dict[str, list[float]]) -> tuple[list[Row], list[Check]]:
    first = curves[PREPARED]
    rows: list[Row] = [
        {"cluster": way, "attempts": runs[way].attempt() if way in runs else 1,
         "last loss": f"{curve[-1]:.6f}", "relative difference": apart(curve, first)}
        for way, curve in curves.items()
    ]  # fmt: skip
    checks = [
        at_most(f"{way}: difference to {PREPARED}", apart(curve, first), SAME)
        for way, curve in curves.items()
        if way not in (PREPARED, WRONG)
    ]
    checks.append(at_least(f"{WRONG}: difference to {PREPARED}", apart(curves[WRONG], first), APART))
    checks.append(at_least("attempts of the disturbed run", float(list(runs.values())[-1].attempt()), 5))
    return rows, checks


if __name__ == "__main__":
    main()
