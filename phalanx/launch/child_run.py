"""A run in a fresh Python process, for `phalanx.train`: a process with threads or an opened accelerator, such as a
notebook, cannot fork ranks.

Request and answer are files of a temporary folder. A KeyboardInterrupt here is a SIGINT there, which saves first.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from phalanx.config import load
from phalanx.config.schema import Config
from phalanx.core.errors import PhalanxError
from phalanx.core.placement import ExitCode
from phalanx.core.run_paths import RunPaths
from phalanx.launch import run
from phalanx.report import notebook
from phalanx.report.console import Follower
from phalanx.storage import files as storage
from phalanx.storage import mirror, permissions
from phalanx.system.fork import answer_into, error_of, signal_at_parent_death

START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from phalanx.launch.child_run import main; main()"
POLL_S = 0.1
FORCES_COLOR = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")  # as Jupyter sets, even of a file


def prepare_run_folder(config: Config, place: str) -> RunPaths:
    """Paths of a run that trains in a folder or at a URL. Files written from now on have the permissions that the
    recipe, or the folder, asks for."""
    if storage.is_url(place):
        paths = mirror.make_working_paths(place, config.data.cache, config.resilience.storage_timeout_s)
    else:
        paths = RunPaths(Path(place))
    permissions.restrict_permissions(paths.root, config.storage.private)
    return paths


def train_in_child(config: Config, place: str, ranks: int | None) -> int:
    """Train in a new process, which shows the run on this process's output, and return its exit code.

    Raises PhalanxError as the run did.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-") as name:
        folder = Path(name)
        request = {
            "config": config.model_dump(mode="json", exclude_unset=True),
            "run_dir": place,
            "ranks": ranks,
            "parent": os.getpid(),
        }
        (folder / "request.json").write_text(json.dumps(request))
        command = [sys.executable, "-u", "-c", START, name, json.dumps([str(Path.cwd() / each) for each in sys.path])]
        shown = None if _owns_stdout() else _ChildOutput(folder / "output.txt", config, place)
        stream = None if shown is None else shown.file
        environment = {name: value for name, value in os.environ.items() if shown is None or name not in FORCES_COLOR}
        # A separate process group: an interrupt of a terminal or a notebook must reach it once, through this process.
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream and subprocess.STDOUT,
            process_group=0,
            env=environment,
        )
        try:
            _wait(child, shown)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            if shown is not None:
                shown.close()
        return _read_answer(folder / "answer.json", child.returncode)


def _wait(child: "subprocess.Popen[bytes]", shown: "_ChildOutput | None") -> None:
    while True:
        try:
            if child.poll() is not None:
                return
            time.sleep(POLL_S)
            if shown is not None:
                shown.poll()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)


def _read_answer(file: Path, returncode: int) -> int:
    answer = json.loads(file.read_text()) if file.is_file() and file.stat().st_size else None
    if isinstance(answer, int):
        return answer
    if answer is not None:
        raise error_of(answer)
    if returncode == -signal.SIGINT:  # before it could heed one
        return int(ExitCode.STOPPED)
    how = signal.Signals(-returncode).name if returncode < 0 else f"exit code {returncode}"
    raise PhalanxError(f"the training process ended without a result ({how}); the same call resumes the run")


def _owns_stdout() -> bool:
    """Whether this process's `print` goes where a child's output goes."""
    if notebook.is_notebook():
        return False
    try:
        return sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


class _ChildOutput:
    """Prints the child's output as lines of this process; in a notebook, with a progress bar instead of progress
    lines."""

    def __init__(self, path: Path, config: Config, place: str) -> None:
        self.file: TextIO = open(path, "w")  # noqa: SIM115
        self._read, self._pending = open(path), ""  # noqa: SIM115
        self._follower: Follower | None = None
        self._progress_line: re.Pattern[str] | None = None
        if notebook.is_notebook():
            paths = RunPaths(Path(place)) if not storage.is_url(place) else None
            if paths is not None:
                self._bar = notebook.NotebookBar(config.train.steps, paths.name)
                self._follower = Follower(paths, self._bar)
                self._progress_line = re.compile(rf"[\d:]+ \S+ {re.escape(paths.name)} step \d+/\d+  ")

    def poll(self, final: bool = False) -> None:
        """Print the new whole lines."""
        *lines, self._pending = (self._pending + self._read.read()).split("\n")
        if final and self._pending:
            lines.append(self._pending)
        for line in lines:
            if self._progress_line is None or not self._progress_line.match(line):
                print(line)  # noqa: T201
        if self._follower is not None:
            self._follower.poll(final)

    def close(self) -> None:
        """Print the rest."""
        self.poll(final=True)
        if self._follower is not None:
            self._bar.close()
        self.file.close()
        self._read.close()


# ----------------------------------------------------------------------------------------------------------- the child


def main() -> None:
    """Main function of the child: reads the request, writes the answer."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    signal_at_parent_death(request["parent"], signal.SIGTERM)
    answer = os.open(folder / "answer.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    raise SystemExit(answer_into(answer, _train, (request,)))


def _train(request: dict[str, Any]) -> int:
    config = load.build_config(request["config"], "the recipe")
    return run.train(config, prepare_run_folder(config, request["run_dir"]), request["ranks"], os.environ)
