"""Run functions, and the command line, on the simulated accelerator.

`run_on_device` is `tests.helpers.run_ranks` whose ranks load the device (in milliseconds) before they do anything else;
the process that they are forked from, and with it the tests on CPUs, never sees it.
"""

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.placement import Placement
from tests.accelerator import build
from tests.dist.command import call
from tests.helpers import ROOT, run_ranks

ORDERS = ("eager", "lazy", "side_last", "main_last", "random", "threads")
needs_device = pytest.mark.skipif(build.reason_against() is not None, reason=str(build.reason_against()))


def settings(
    order: str = "lazy",
    delay_ms: float = 0,
    seed: int = 0,
    devices: int = 1,
    memory_mb: int = 4096,
    **others: Any,
) -> dict[str, str]:
    """The device's variables (see tests.accelerator.torch_sim); `others` are those of further names, such as fail."""
    assert order in ORDERS, order
    given = {"order": order, "delay_us": int(delay_ms * 1000), "seed": seed, "devices": devices, "memory_mb": memory_mb}
    return {f"SIM_{name.upper()}": str(value) for name, value in (given | others).items()}


def sim_environment(**how: Any) -> dict[str, str]:
    """Variables with which every Python process has the device as soon as it imports torch; `how` as in `settings`.

    For processes that are started, not forked: torch finds the device's entry point on Python's path.
    """
    path = [str(build.library().parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return settings(**how) | {"PYTHONPATH": os.pathsep.join(path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def run_on_device(
    function: Callable[..., Any] | str,
    world: int = 1,
    order: str = "lazy",
    delay_ms: float = 0,
    seed: int = 0,
    devices: int | None = None,
    memory_mb: int | Sequence[int] = 4096,
    timeout_s: float = 120,
    restarts: int = 0,
    shared: Path | None = None,
    on: Sequence[str] | None = None,
    fail: str = "",
    collectives: bool = True,
    watchdog: bool = True,
    connections: int = 8,
    link_mb_s: int = 0,
    slices: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """`run_ranks` with the simulated accelerator in each rank: results by rank of `function(placement, **kwargs)`.

    `on`: the device of each rank, such as ["sim:0", "cpu"]; by default each has one of its own. `devices`: how many
    there are; by default as many as ranks. `memory_mb`: of each device, or of those of each rank. `collectives`:
    whether they have some of their own. `delay_ms` and `seed` are for the order `threads`, `seed` for `random`, too.
    `fail`, `watchdog`, `connections`, `link_mb_s`, `slices`: SIM_FAIL and so on.

    Raises:
        AssertionError: a rank failed or the time was up; the text has the first cause's traceback and the logs' ends.
    """
    build.library()  # not in the ranks' time
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    places = [f"sim:{rank}" for rank in range(world)] if on is None else list(on)
    assert len(places) == world, (places, world)
    devices = world if devices is None else devices
    others = {
        "connections": connections,
        "slices": slices,
        "link_mb_s": link_mb_s,
        "fail": fail,
        "watchdog": int(watchdog),
        "collectives": int(collectives),
    }
    memory = [memory_mb] * world if isinstance(memory_mb, int) else list(memory_mb)
    assert len(memory) == world, (memory, world)
    chosen = [settings(order, delay_ms, seed, devices, each, **others) for each in memory]
    return run_ranks(
        on_device,
        world,
        timeout_s,
        restarts,
        shared,
        sim_function=name,
        sim_settings=chosen,
        sim_places=places,
        **kwargs,
    )


def on_device(
    placement: Placement, sim_function: str, sim_settings: list[dict[str, str]], sim_places: list[str], **kwargs: Any
) -> Any:
    """One rank: load the device, and call the function with the rank's place on it."""
    load(sim_settings[placement.rank])
    module, name = sim_function.split(":")
    placed = dataclasses.replace(placement, device=sim_places[placement.rank])
    return getattr(importlib.import_module(module), name)(placed, **kwargs)


def load(chosen: dict[str, str]) -> None:
    """Have the device in this process, which has not touched it yet, and in those that it starts or forks."""
    os.environ.update(chosen)
    from tests.accelerator import torch_sim

    torch_sim.register()


def phalanx(folder: Path, *arguments: str, **how: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line whose machine has the simulated accelerator: the ranks that it
    forks find the device, as a real one, and it is what they train on. `how` as in `run_on_device`."""
    code, out, err = run_on_device(call, 1, folder=str(folder), commands=[list(arguments)], **how)[0][0]
    return code, out, err
