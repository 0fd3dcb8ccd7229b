"""Running users' callbacks: on rank 0, in a fixed order, with their state in checkpoints.

What a callback receives is a function of the run alone. After a failure it gets its state from a checkpoint, then the
records since that checkpoint again. All ranks agree on its requests at the end of a step, by a message that they
exchange anyway. So a killed run stops, saves and evaluates at the same steps as an uninterrupted one.
"""

import functools
import hashlib
import inspect
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.checkpoint.disk.load import Checkpoint, list_steps, step_folder
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.core.json_lines import read_last_line
from phalanx.core.placement import Placement
from phalanx.core.records import EventKind, read_events, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.core.user_code import describe_error, load_class, source_file
from phalanx.engine.interface import Engine
from phalanx.trainer.callback import Callback, CallbackRequest, RunState
from phalanx.workload.step_hooks import StepHooks

if TYPE_CHECKING:
    from phalanx.config.schema import Config

log = logging.getLogger(__name__)

HEADER_KEY = "callbacks"  # key of a checkpoint's header
DEFAULT_STOP_REASON = "requested by a callback"  # on ranks that have no callbacks


def load_callback_class(config: "Config", paths: RunPaths | None = None) -> type[Callback] | None:
    """The class that `callback.code` names, from the run folder's copy if there is one; None without the key.
    Raises ConfigError for a file without such a class, and for options that it does not take.
    """
    if config.callback.code is None:
        return None
    kept = paths is not None and paths.callback_code.is_file()
    file = paths.callback_code if paths is not None and kept else Path(config.callback.code)
    found = load_class("callback.code", file, "Callback", Callback)
    try:
        inspect.signature(found).bind(**config.callback.options)
    except TypeError as error:
        raise ConfigError(
            f"callback.options do not match the class Callback of {file}: {error}; correct them"
        ) from None
    return found


@dataclass(frozen=True)
class NamedCallback:
    """A callback; `name` is for messages, `version` identifies its code and options."""

    callback: Callback
    name: str
    file: str
    version: str


def collect_callbacks(config: "Config", paths: RunPaths, given: Sequence[Callback]) -> list[NamedCallback]:
    """The recipe's callback, then those `given` to `launch.run.train`. Raises ConfigError for one that cannot be
    constructed."""
    found = []
    if (made := load_callback_class(config, paths)) is not None:
        file = source_file(made)
        text = Path(file).read_text(encoding="utf-8") + json.dumps(config.callback.options, sort_keys=True)
        name = f"callback.code {config.callback.code}"
        options = config.callback.options
        callback = _call_user_code(name, file, "Callback(**callback.options)", lambda: made(**options))
        found.append(NamedCallback(callback, name, file, hashlib.sha256(text.encode()).hexdigest()[:16]))
    for callback in given:
        kind = type(callback)
        found.append(NamedCallback(callback, f"the callback {kind.__qualname__}", source_file(kind), kind.__qualname__))
    return found


class CallbackRunner:
    """Runner of the callbacks of a run.

    On rank 0 it is a metric sink: events are queued until the training loop dispatches them. The same on all ranks:
    `due`, the requests for the end of the last step, and `over`, why a callback has ended training (the wording may
    differ), or None.
    """

    def __init__(
        self,
        callbacks: Sequence[NamedCallback] = (),
        run: RunState | None = None,
        paths: RunPaths | None = None,
        group: JsonGroup | None = None,
        model_divided: bool = False,
    ) -> None:
        """Without arguments there are no callbacks. `group` is for `resume_at`, on all ranks of a run with
        callbacks; `model_divided`: layers are split over ranks."""
        self.due_requests = CallbackRequest(0)
        self.stop_reason: str | None = None
        self.step_hooks = StepHooks()
        self._callbacks, self._run, self._paths, self._group, self._model_divided = (
            callbacks,
            run,
            paths,
            group,
            model_divided,
        )
        self._pending: deque[tuple[str, dict[str, Any]]] = deque()
        self._requests, self._reason = CallbackRequest(0), DEFAULT_STOP_REASON  # requests for the next step to end
        self._newest = 0  # the last step that was ever dispatched
        self._evaluated = 0  # the step of the last evaluation that was dispatched
        self._begun = False
        if run is not None:
            run.request = self._request

    # --------------------------------------------------------------------------------------------------------- a sink

    def on_step(self, record: dict[str, Any]) -> None:
        if self._callbacks:
            self._pending.append(("step", record))

    def on_event(self, event: dict[str, Any]) -> None:
        if self._callbacks and event["kind"] in (EventKind.EVALUATED, EventKind.CHECKPOINT_SAVED):
            self._pending.append((event["kind"], event))

    def close(self) -> None: ...

    # ------------------------------------------------------------------------------------------------ the training loop

    def resume_at(self, step: int, header: Mapping[str, Any] | None) -> None:
        """Continue after `step`; `header` is that of its checkpoint, None for an in-memory checkpoint. Collective."""
        self.due_requests, self.stop_reason = CallbackRequest(0), None
        if self._group is None:
            return
        if self._run is not None:
            self._restore(step, header)
        due, self.stop_reason = self._group.broadcast_object([int(self.due_requests), self.stop_reason])
        self.due_requests = CallbackRequest(due)

    def take_requests(self) -> CallbackRequest:
        """Return and clear the requests for the end of the current step."""
        requests, self._requests = self._requests, CallbackRequest(0)
        return requests

    def apply_requests(self, requests: int) -> None:
        """Apply the `requests` for the end of a step, on which all ranks have agreed."""
        self.due_requests = CallbackRequest(requests)
        if CallbackRequest.STOP in self.due_requests:
            self.stop_reason = self._reason

    def dispatch(self) -> None:
        """Pass new events to the callbacks. Does nothing on other ranks."""
        if self._run is None or not self._pending:
            return
        results: dict[str, dict[str, float | None]] = {}
        while self._pending:
            kind, record = self._pending.popleft()
            if kind == EventKind.EVALUATED:
                results |= _results(record)
                if self._pending and self._pending[0][0] == kind and self._pending[0][1]["step"] == record["step"]:
                    continue
                self._evaluation(int(record["step"]), results)
                results = {}
            elif kind == "step":
                self._step(record)
            else:
                self._call("on_save", int(record["step"]))

    def send_weights(self, engine: Engine, moved: Mapping[str, Tensor]) -> None:
        """Pass the weights to the callbacks, and those that are `moved` beside the engine. Collective."""
        with engine.full_parameters() as whole:
            held = {**whole, **moved}
            copies = {name: each.detach().cpu().clone() for name, each in held.items()} if self._callbacks else {}
        self._call("on_weights", copies)

    def end_training(self, step: int, reason: str | None) -> None:
        """Report the end of training after `step`, whose checkpoint is saved."""
        self.dispatch()
        if self._run is not None:
            self._run.step = step
        self._call("on_train_end", reason)

    def to_header(self, step: int) -> dict[str, Any]:
        """State of the callbacks for the checkpoint of `step`; empty on other ranks."""
        if not self._callbacks:
            return {}
        states = [self._state(each) for each in self._callbacks]
        stop = self.stop_reason or (self._reason if CallbackRequest.STOP in self._requests else None)
        entry = {
            "versions": [each.version for each in self._callbacks],
            "states": states,
            "requests": int(self._requests),
            "stop": stop,
            "over": self.stop_reason is not None,
            "evaluated": self._evaluated >= step,
        }
        return {HEADER_KEY: entry}

    # ---------------------------------------------------------------------------------------------------------- inside

    def _request(self, request: CallbackRequest, reason: str) -> None:
        assert self._run is not None
        if request == CallbackRequest.WEIGHTS and self._model_divided:
            raise ConfigError(
                "gather_weights needs all weights on one rank, but parallel.tensor, parallel.pipeline or "
                "parallel.expert splits them; read the checkpoint that on_save names instead, or set these to 1"
            )
        if request == CallbackRequest.STOP and CallbackRequest.STOP not in self._requests:
            self._reason = reason
        self._requests |= request

    def _restore(self, step: int, header: Mapping[str, Any] | None) -> None:
        """Restore the callbacks' state of `step`."""
        assert self._run is not None
        assert self._paths is not None
        self._pending.clear()
        self._requests = CallbackRequest(0)
        if not self._begun:
            newest = (read_last_line(self._paths.metrics) or {}).get("step")
            self._newest = max(step, newest) if type(newest) is int else step
        since, entry = (step, header.get(HEADER_KEY)) if header is not None else _find_saved_state(step, self._paths)
        self._load(since, entry)
        first, self._begun = not self._begun, True
        if first:
            pending, self._requests = self._requests, CallbackRequest(0)
            self._run.step = step
            self._call("on_train_begin")
            new, self._requests = self._requests, pending
        self._replay(since, step)
        if first:
            self._requests |= new

    def _load(self, since: int, entry: Any) -> None:
        self._evaluated = since
        if not isinstance(entry, dict):
            return
        same = entry.get("versions") == [each.version for each in self._callbacks]
        for each, state in zip(self._callbacks, entry.get("states", []), strict=False):
            restore = functools.partial(each.callback.load_state_dict, state)
            _call_user_code(each.name, each.file, "load_state_dict(state)", restore)
        if not entry.get("evaluated", True):
            self._evaluated = since - 1
        if same:  # requests of other code or options are not repeated; the current callbacks make theirs again
            self._requests, self._reason = (
                CallbackRequest(int(entry["requests"])),
                str(entry["stop"] or DEFAULT_STOP_REASON),
            )
            self.stop_reason = self._reason if entry.get("over") else None

    def _replay(self, since: int, step: int) -> None:
        """Replay the records after `since` up to `step`."""
        assert self._paths is not None
        if since == step and self._evaluated == since:
            return
        evaluations: dict[int, dict[str, dict[str, float | None]]] = {}
        for event in read_events(self._paths.events):
            if event.get("kind") == EventKind.EVALUATED and type(event.get("step")) is int:
                evaluations.setdefault(event["step"], {}).update(_results(event))
        records = {record["step"]: record for record in read_steps(self._paths.metrics)}
        for number in range(since, step + 1):
            if number > since:
                self.apply_requests(self.take_requests())
            if number > since and number in records:
                self._step(records[number])
            if number > self._evaluated and number in evaluations:
                self._evaluation(number, evaluations[number])

    def _step(self, record: dict[str, Any]) -> None:
        assert self._run is not None
        self._run.step = int(record["step"])
        self._run.replayed = self._run.step <= self._newest
        self._newest = max(self._newest, self._run.step)
        self._call("on_step_end", dict(record))

    def _evaluation(self, step: int, results: dict[str, dict[str, float | None]]) -> None:
        assert self._run is not None
        self._run.step = self._evaluated = step
        self._call("on_evaluate", results)

    def _call(self, method: str, *arguments: Any) -> None:
        if self._run is None or not self._callbacks:
            return
        self.step_hooks.enter_phase("callback")
        for each in self._callbacks:
            function = functools.partial(getattr(each.callback, method), self._run, *arguments)
            _call_user_code(each.name, each.file, f"{method} after step {self._run.step}", function)

    def _state(self, each: NamedCallback) -> dict[str, Any]:
        state = _call_user_code(each.name, each.file, "state_dict()", each.callback.state_dict)
        try:
            if not isinstance(state, dict):
                raise TypeError(f"it is a {type(state).__name__}")
            return dict(json.loads(json.dumps(state, allow_nan=False)))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{each.name}: state_dict() returns no dictionary of JSON values ({error}); return only numbers, "
                "strings, lists and dictionaries"
            ) from None


def make_callback_runner(
    config: "Config", given: Sequence[Callback], paths: RunPaths, placement: Placement, mesh: Mesh
) -> CallbackRunner:
    """Make the runner of a run's callbacks, on rank 0; other ranks only take part in the agreement."""
    if config.callback.code is None and not given:
        return CallbackRunner()
    group = JsonGroup(mesh.checkpoint)
    if mesh.rank:
        return CallbackRunner(group=group)
    run = RunState(lambda request, reason: None, config.train.steps, paths.root, mesh.world, placement.attempt)
    divided = mesh.axes.model_parallel_size * mesh.axes.expert > 1
    return CallbackRunner(collect_callbacks(config, paths, given), run, paths, group, divided)


def _find_saved_state(step: int, paths: RunPaths) -> tuple[int, Any]:
    """The newest checkpoint up to `step` that has state of the callbacks, and that state; 0 and None without one."""
    for saved in list_steps(paths.checkpoints):
        if saved > step:
            continue
        try:
            checkpoint = Checkpoint(step_folder(paths.checkpoints, saved))
        except CheckpointError:
            continue
        checkpoint.close()
        return saved, checkpoint.header.get(HEADER_KEY)
    return 0, None


def _results(event: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Loss and scores by the set's name, as JSON has them: None for a loss that is not a number."""
    loss = event.get("loss")
    return {
        str(event.get("set")): {
            "loss": loss if loss is not None and math.isfinite(loss) else None,
            **event.get("scores", {}),
        }
    }


def _call_user_code(name: str, file: str, said: str, function: Callable[[], Any]) -> Any:
    """Call a callback's method. Raises ConfigError with the line of any exception; the log has the traceback."""
    try:
        return function()
    except PhalanxError:
        raise
    except (Exception, SystemExit) as caught:
        log.error("%s: %s fails", name, said, exc_info=caught)
        raise ConfigError(
            f"{name}: {said} fails: {describe_error(caught, file)}; correct it (its traceback is in the log of rank 0)"
        ) from caught
