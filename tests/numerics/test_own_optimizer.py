"""An optimizer class and a schedule in files of the user's: one curve on any shards, checked before the start."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from phalanx.comm.mesh import join
from phalanx.config.load import build_config
from phalanx.config.schema import OptimSection
from phalanx.core.errors import ConfigError, RunError
from phalanx.core.placement import Placement
from phalanx.core.run_paths import RunPaths
from phalanx.optim.lr_schedule import check_schedule, learning_rate
from phalanx.optim.make_rule import make_rule
from phalanx.trainer import run_folder, train_rank
from phalanx.trainer.resolve import _check_optimizer
from tests.helpers import run_ranks
from tests.numerics import runs
from tests.numerics.runs import distance, farthest

STEPS = 6
CODE = """
import torch


class Lion(torch.optim.Optimizer):
    granularity = "element"

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.tanh(100 * (first * mean + (1 - first) * p.grad)))
                mean.lerp_(p.grad, 1 - second)


class RowScaled(torch.optim.Optimizer):
    granularity = "row"

    def __init__(self, params, lr, decay=0.9):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["square"] = 0, torch.zeros_like(p[..., :1] if p.dim() > 1 else p)
                state["step"] += 1
                square = p.grad.square().mean(-1, keepdim=True) if p.dim() > 1 else p.grad.square()
                state["square"].lerp_(square, 1 - group["decay"])
                p.sub_(group["lr"] * p.grad / ((state["square"] / (1 - group["decay"] ** state["step"])).sqrt() + 1e-8))


class Normed(torch.optim.Optimizer):
    granularity = "matrix"

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad)
                p.sub_(group["lr"] * mean / (mean.norm() + 1e-8))


class Undeclared(torch.optim.SGD):
    pass


class Claims(Normed):
    granularity = "row"


class Remembers(Lion):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["gate"] = 0.5


class StartsElsewhere(Lion):
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", torch.ones_like(p))
        super().step()


def saw(step):
    return 1.0 - 0.1 * (step % 5)


def drifts(step, calls=[]):
    calls.append(step)
    return 1 / len(calls)


def nothing(step):
    return -1.0


def breaks(step):
    return 1 / (step - 1)
"""
CASES = {
    "Lion": {"optim.beta2": 0.99, "optim.lr": 3e-3, "optim.weight_decay": 0.1, "optim.schedule": "saw"},
    "RowScaled": {"optim.options": {"decay": 0.95}, "optim.lr": 3e-3},
    "Normed": {"optim.lr": 3e-2},
}
LAYOUTS = {"Lion": (2, [3, 1]), "RowScaled": (3, [1, 4]), "Normed": (2, [3, 1])}  # zero, shares of the state


def train(placement: Placement, folder: str, data: str, layouts: list[dict[str, dict[str, Any]]]) -> list[int]:
    """The run of every case on these ranks, in a folder of its own, in which the next layout goes on."""
    codes = []
    with join(placement, 60) as mesh:
        for layout, (name, given) in itertools.product(layouts, CASES.items()):
            changes = given | {
                "optim.name": f"{folder}/own.py:{name}",
                "train.steps": STEPS,
                "optim.decay_steps": STEPS,
            }
            changes |= {"optim.warmup_steps": 0, "train.eval_sequences": 0} | layout.get(name, {})
            if "optim.schedule" in given:
                changes["optim.schedule"] = f"{folder}/own.py:{given['optim.schedule']}"
            described = runs.job(f"{folder}/{placement.world}-{name}", data, changes, placement.world)
            uneven = tuple(changes.get("balance.optimizer_state", ())) or None
            loop = runs.loop_among(mesh, placement, described, uneven)
            codes.append(int(train_rank.run_steps(loop, loop.restore())))
            loop.setup.close()
    return codes


def test_each_granularity_walks_the_curve_of_one_rank(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    arguments: dict[str, Any] = {"folder": str(tmp_path), "data": str(tokens)}
    run_ranks(train, 1, layouts=[{}], **arguments)
    uneven = {
        name: {"parallel.zero": zero, "balance.optimizer_state": state} for name, (zero, state) in LAYOUTS.items()
    }
    run_ranks(train, 2, layouts=[uneven], **arguments)
    thirds = {"Normed": {"parallel.zero": 3}, "Lion": {"train.steps": STEPS // 2}}
    run_ranks(train, 3, layouts=[thirds, {}], **arguments)  # Lion continues from its checkpoint
    for name in CASES:
        alone = runs.outcome(tmp_path / f"1-{name}")
        assert alone.losses[-1] < alone.losses[0] - 0.05, name
        kinds = {key.partition("/")[0] for key in alone.state}
        for ranks in (2, 3):
            found = runs.outcome(tmp_path / f"{ranks}-{name}")
            apart = {kind: distance(found.state, alone.state, kind) for kind in kinds}
            print(name, ranks, farthest(found.losses, alone.losses), apart)
            assert max(farthest(found.losses, alone.losses), *apart.values()) < 1e-9, name
    assert kinds == {"param", "mean"}
    assert runs.outcome(tmp_path / "1-RowScaled").state["row_square/embed.weight"].numel() == runs.VOCAB


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"name": "Missing"}, "defines no class Missing"),
        ({"name": "saw"}, "saw is not a subclass of torch.optim.optimizer.Optimizer"),
        ({"name": "Undeclared"}, "has no attribute granularity; add it"),
        ({"name": "Claims"}, "cut as granularity 'row' allows"),
        ({"name": "Remembers"}, "keeps 'gate', no tensor"),
        ({"name": "StartsElsewhere"}, "or whose state starts at 0"),
        ({"name": "Lion", "options": {"nesterov": 1}}, "unexpected keyword argument 'nesterov'"),
        ({"name": "Normed", "weight_decay": 0.1}, "takes no weight_decay"),
        ({"schedule": "missing"}, "defines no function missing"),
        ({"schedule": "drifts"}, "returns 1.0 and then 0.5 for step 1; make it a function of the step alone"),
        ({"schedule": "nothing"}, "returns -1.0 for step 1"),
        ({"schedule": "breaks"}, "fails in step 1: ZeroDivisionError: division by zero in line"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_at_the_start(
    optim: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(CODE)
    own = {key: f"{tmp_path}/own.py:{optim[key]}" for key in ("name", "schedule") if key in optim}
    section = OptimSection(**{"weight_decay": 0.0, "decay_steps": 9} | optim | own)
    with pytest.raises(ConfigError, match=message):
        check_schedule(section, 9) if "schedule" in optim else make_rule(section)


def test_whole_rows_and_matrices_are_not_divided(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    for axis, architecture in (("tensor", "llama"), ("expert", "mixtral")):
        model: dict[str, Any] = {"architecture": architecture, "hidden": 32, "layers": 1, "heads": 2}
        model |= {"moe": {"experts": 4, "experts_per_token": 2}} if axis == "expert" else {}
        for name in ("RowScaled", "Normed") if axis == "tensor" else ("Normed",):
            tree = {
                "model": model,
                "parallel": {axis: 2},
                "optim": {"name": f"{tmp_path}/own.py:{name}", "weight_decay": 0},
            }
            with pytest.raises(
                ConfigError, match=f"and cannot be combined with parallel.{axis}; set parallel.{axis}=1"
            ):
                _check_optimizer(build_config(tree, "the recipe"))


def test_keys_that_a_function_does_not_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    schedule = f"{tmp_path}/own.py:saw"
    assert learning_rate(OptimSection(lr=2.0, schedule=schedule, decay_steps=9), 3) == pytest.approx(1.4)
    for key, value in {"warmup_steps": 2, "min_lr_ratio": 0.2, "power": 3.0}.items():
        with pytest.raises(ConfigError, match=f"optim.{key} has no effect with optim.schedule "):
            build_config({"model": {"preset": "llama-3.2-1b"}, "optim": {"schedule": schedule, key: value}}, "here")
    with pytest.raises(ConfigError, match=r"names no class; write it as my.py:Class"):
        build_config({"model": {"preset": "llama-3.2-1b"}, "optim": {"name": "own.py"}}, "here")


def test_the_run_folder_keeps_the_files_and_trains_by_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    optim = {"name": f"{tmp_path}/own.py:Lion", "schedule": f"{tmp_path}/own.py:saw"}
    config = build_config({"model": {"preset": "llama-3.2-1b"}, "optim": optim}, "here")
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    assert run_folder.use_kept_code(config, paths) == config
    run_folder.write_start(paths, config, None)
    kept = run_folder.use_kept_code(config, paths).optim
    assert (kept.name, kept.schedule) == (f"{paths.root}/optimizer.py:Lion", f"{paths.root}/schedule.py:saw")
    run_folder.check_run_code(paths, config, resuming=True)
    (tmp_path / "own.py").write_text(CODE.replace("0.1 *", "0.2 *"))
    with pytest.raises(RunError, match=r"optim.name .* is not what the run in .* began with"):
        run_folder.check_run_code(paths, config, resuming=True)
