"""Weights & Biases as a sink, by its own package and in the mode that its own environment says (WANDB_MODE).

A failing server, now or later, costs only its curves.
"""

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import ConfigError
from phalanx.core.json_lines import write_atomic
from phalanx.core.records import EventKind, write_event
from phalanx.core.run_paths import RunPaths
from phalanx.workload.sinks import evaluation_scalars, step_scalars

if TYPE_CHECKING:
    from phalanx.config.schema import Config

START_S = 30.0  # time for its server to answer before the run continues without it
FINISH_S = 60.0  # what the upload of the last lines gets; `wandb sync` sends what is left
OFFLINE = ("offline", "disabled", "dryrun")

log = logging.getLogger(__name__)


def check_wandb(project: str) -> None:
    """Check that logging to `project` can work. Raises ConfigError without the package or a login.

    It starts wandb's own service: call it in a child process.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            f"report.wandb {project} needs the package wandb, which is not installed; install it, or set "
            "report.wandb=null"
        ) from None
    try:
        mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
        if mode not in OFFLINE:
            wandb.login(verify=False, timeout=1)  # whether its server is there is another question
    except Exception as error:  # its own kinds of error, and whatever a setting of its environment raises
        raise ConfigError(
            f"report.wandb {project} cannot be used ({_first_line(error)}); run `wandb login`, set WANDB_API_KEY, or "
            "set WANDB_MODE=offline"
        ) from None


class WandbSink:
    """Logs the scalars that TensorBoard gets too. Attempts and later starts of a run keep the same id, in the run
    folder. Any exception of wandb becomes one warning, and ends the logging, not the run."""

    def __init__(self, paths: RunPaths, config: "Config", attempt: int) -> None:
        self._paths, self._attempt = paths, attempt
        self._run: Any = None
        self._stop_on_error("does not start", lambda: self._open(config))

    def _open(self, config: "Config") -> None:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=START_S, finish_timeout=FINISH_S, disable_git=True
        )
        self._run = wandb.init(
            project=config.report.wandb,
            id=run_id(self._paths),
            resume="allow",
            dir=str(self._paths.root),
            name=self._paths.name,
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        # Its own step may not go back, as ours does after a restart.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, record: dict[str, Any]) -> None:
        self._log(step_scalars(record), record)

    def on_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == EventKind.EVALUATED:
            self._log(evaluation_scalars(event), event)

    def _log(self, scalars: dict[str, float | None], record: dict[str, Any]) -> None:
        known = {name: value for name, value in scalars.items() if value is not None}
        if self._run is not None:
            self._stop_on_error("takes no more", lambda: self._run.log({"step": record["step"], **known}))

    def close(self) -> None:
        if self._run is not None:
            self._stop_on_error("did not take the end", self._run.finish)

    def _stop_on_error(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # wandb raises what its service, its server and its disk happened to raise
            self._run = None
            message = f"Weights & Biases {what}, so the run continues without it: {_first_line(error)}"
            log.warning("%s", message, exc_info=True)
            with suppress(OSError):  # no room for it: the log has it
                write_event(self._paths.events, EventKind.WARNING, self._attempt, message=message)


def run_id(paths: RunPaths) -> str:
    """The run's id at Weights & Biases: drawn at its first start, then kept in the run folder."""
    if paths.wandb.exists():
        return str(json.loads(paths.wandb.read_text(encoding="utf-8"))["id"])
    drawn = secrets.token_hex(8)
    write_atomic(paths.wandb, json.dumps({"id": drawn}) + "\n")
    return drawn


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
