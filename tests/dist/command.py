"""The real command line in a process forked from one that has imported torch, so that each call takes little time."""

import contextlib
import io
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from phalanx.config.schema import Config
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode, Placement
from phalanx.system.exit_causes import describe_exception
from phalanx.system.fork import error_of
from tests.helpers import run_ranks

RECIPE = """
model: {hidden: 16, layers: 1, heads: 2, intermediate: 32}
data: {source: text.jsonl, tokenizer_vocab: 280, seq_len: 8, held_out: 0.3, cache: cache}
train: {steps: 2, global_batch: 4, micro_batch: 2, eval_sequences: 4}
optim: {decay_steps: 10}
balance: {batch: even}  # else the devices are measured first, for three times as long as this trains
report: {tensorboard: false}
"""


def call(
    placement: Placement,
    folder: str,
    commands: list[list[str]],
    free_bytes: int | None = None,
    room_bytes: int | None = None,
    environment: dict[str, str | None] | None = None,
    block_s: float | None = None,
) -> list[Any]:
    """[exit code, output, errors] of each command line, with `folder` as the working folder.

    `free_bytes`: what the device is said to have free. `room_bytes`: how much more memory this process can really map.
    `environment`: variables that are another, or None and not there. `block_s`: for how long a device is measured at a
    time, and with that little of all else.
    """
    from phalanx.cli import root
    from phalanx.system import accelerator

    os.chdir(folder)
    for name, value in (environment or {}).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if room_bytes is not None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + room_bytes, mapped + room_bytes))
    if free_bytes is not None:
        accelerator.memory_free = lambda device, local_world: free_bytes
    if block_s is not None:
        from phalanx.autotune import link_speed, measure

        measure.BLOCK_S, measure.BLOCKS, link_speed.LINK_BYTES = block_s, 3, 2**14
    results = []
    for arguments in commands:
        sys.argv = ["phalanx", *arguments]
        out, err = io.StringIO(), io.StringIO()
        code: Any = "it returned"
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                root.main()
            except SystemExit as leaving:
                code = leaving.code
        results.append([code, out.getvalue(), err.getvalue()])
    return results


def phalanx(folder: Path, *arguments: str, **how: Any) -> tuple[int, str, str]:
    code, out, err = run_ranks(call, 1, folder=str(folder), commands=[list(arguments)], **how)[0][0]
    return code, out, err


def refused(folder: Path, *arguments: str, code: int = ExitCode.CONFIG, **how: Any) -> str:
    """The one sentence with which a command line is refused."""
    found, _, err = phalanx(folder, *arguments, **how)
    return sentence(found, err, code)


def sentence(found: int, err: str, code: int = ExitCode.CONFIG) -> str:
    assert found == code, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    assert "bug of Phalanx" not in err
    assert len(err) < 700
    return err[len("error: ") : -1]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the lock, which is written by whoever tries to use the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def write_place(folder: Path) -> Path:
    """Put a text and a recipe into a folder."""
    lines = [json.dumps({"text": f"document {i} says hello " * (i % 5 + 3)}) for i in range(60)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def write_slow_callback(folder: Path) -> str:
    """Put a callback that sleeps after each step into a folder, and return the setting that names it: a run that is
    only looked after shall not keep a core busy."""
    code = "import time, phalanx\n\nclass Callback(phalanx.Callback):\n    "
    code += "def on_step_end(self, run, metrics):\n        time.sleep(0.05)\n"
    (folder / "slow.py").write_text(code)
    return "callback.code=slow.py"


def train_in_warm_child(config: Config, place: str, ranks: int | None) -> int:
    """`child_run.train_in_child` in a process forked from one that has imported torch."""
    tree = config.model_dump(mode="json", exclude_unset=True)
    request = {"config": tree, "run_dir": str(Path(place).absolute()), "ranks": ranks, "folder": str(Path.cwd())}
    (answer,) = run_ranks(_train, 1, timeout_s=240, request=request)
    if isinstance(answer, int):
        return answer
    raise error_of(answer)


def _train(placement: Placement, request: dict[str, Any]) -> Any:
    from phalanx.launch import child_run

    os.chdir(request["folder"])
    try:
        return child_run._train(request)
    except PhalanxError as error:
        return describe_exception(error)
