"""Worker processes that encode chunks in parallel; the first error in chunk order is reported.

They are fresh interpreters, not forks, so the parent may have any number of threads; they end with it.
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, DataError, PhalanxError, StorageError
from phalanx.core.run_paths import redact_url
from phalanx.data.encode import GROUP_CHARS, EncodeTask, RecordEncoder, encode_chunk, make_encoder
from phalanx.data.read_chunks import Chunk
from phalanx.data.records import RecordFormat

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from phalanx.data.workers import main; main()"
TRIES = 2  # of a chunk whose worker dies
ERROR_TYPES: dict[str, type[PhalanxError]] = {error.__name__: error for error in (ConfigError, DataError, StorageError)}


class _Worker:
    """One process and the task that it works on."""

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self.log = log
        self.task: int | None = None
        self.rest = b""
        with open(log, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def assign(self, index: int, task: EncodeTask) -> None:
        self.task = index
        with contextlib.suppress(BrokenPipeError):  # it has died: the end of its output will say so
            self.stdin.write((json.dumps(asdict(task)) + "\n").encode())
            self.stdin.flush()

    def read_lines(self) -> list[bytes] | None:
        """Its new messages; None when it has ended."""
        data = os.read(self.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines

    def kill(self) -> str:
        """Kill it, and say how it had ended by itself."""
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        if code is None:
            code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{how}: {last[0]}" if last else how


def encode_in_processes(tasks: Sequence[EncodeTask], count: int, logs: Path, on_bytes: Callable[[int], None]) -> None:
    """Encode all tasks with up to `count` processes; their error output goes to `logs`.

    Raises the error of the first task, in order, that has one: DataError, ConfigError, StorageError, OSError of the
    cache; DataError too for a task whose worker died twice; RuntimeError with a traceback for anything else. No process
    is left when it returns or raises, KeyboardInterrupt included.
    """
    waiting = deque(range(len(tasks)))
    tries = [0] * len(tasks)
    told = [0] * len(tasks)  # bytes counted of each, taken back when it is done again
    failed: dict[int, Exception] = {}
    workers: list[_Worker] = []
    started = 0

    with selectors.DefaultSelector() as selector:

        def start() -> None:
            nonlocal started
            worker = _Worker(started, logs / f"worker-{started}.log")
            started += 1
            workers.append(worker)
            selector.register(worker.stdout, selectors.EVENT_READ, worker)
            assign(worker)

        def assign(worker: _Worker) -> None:
            worker.task = None
            if waiting and not failed:
                index = waiting.popleft()
                tries[index] += 1
                worker.assign(index, tasks[index])

        def hear(worker: _Worker, message: dict[str, Any]) -> None:
            index = worker.task
            assert index is not None, "a result without a task"
            if "bytes" in message:
                told[index] += message["bytes"]
                on_bytes(message["bytes"])
                return
            if "done" not in message:
                failed[index] = _error(message, tasks[index])
            assign(worker)

        def bury(worker: _Worker) -> None:
            selector.unregister(worker.stdout)
            workers.remove(worker)
            how, index = worker.kill(), worker.task
            if index is None:
                return
            on_bytes(-told[index])
            told[index] = 0
            if tries[index] < TRIES:
                waiting.appendleft(index)
                start()
            else:
                failed[index] = DataError(
                    f"worker process {worker.number} died ({how}) at {_what(tasks[index])}, like one before it; if "
                    "memory ran out, lower data.workers"
                )

        try:
            for _ in range(min(count, len(tasks))):
                start()
            while any(worker.task is not None for worker in workers):
                if failed and all(worker.task is None or worker.task > min(failed) for worker in workers):
                    break
                for key, _ in selector.select():
                    worker = key.data
                    lines = worker.read_lines()
                    if lines is None:
                        bury(worker)
                    for line in lines or ():
                        hear(worker, json.loads(line))
        finally:
            for worker in workers:
                worker.kill()
    if failed:
        raise failed[min(failed)]


def _error(message: dict[str, Any], task: EncodeTask) -> Exception:
    if "errno" in message:
        return OSError(message["errno"], message["message"], message["file"])
    if message["error"] in ERROR_TYPES:
        return ERROR_TYPES[message["error"]](message["message"])
    return RuntimeError(f"at {_what(task)}:\n{message['message']}")


def _what(task: EncodeTask) -> str:
    more = f" and {len(task.chunk.paths) - 1} more" if len(task.chunk.paths) > 1 else ""
    place = f", bytes {task.chunk.start} to {task.chunk.stop}" if task.chunk.stop else ""
    return f"{redact_url(task.chunk.paths[0])}{more}{place}"


# ------------------------------------------------------------------------------------------------- the worker's process


def main() -> None:
    """A worker process: a line of JSON in on standard input is a task, lines out are progress, its end or its error.

    It ends when its input does, so also when its parent dies in whatever way.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends its workers
    # All cores are busy with processes already. The tokenizer's library reads the C environment, not Python's copy.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    encoders: dict[tuple[str, RecordFormat], RecordEncoder] = {}

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    while True:
        task = _parse_task(json.loads(tasks.get()))
        try:
            known = (task.tokenizer, task.format)
            if known not in encoders:
                encoders[known] = make_encoder(Path(task.tokenizer), task.format, GROUP_CHARS)
            encode_chunk(task, encoders[known], lambda count: answer(bytes=count))
            answer(done=True)
        except BrokenPipeError:
            return  # the parent is gone
        except PhalanxError as error:
            answer(error=type(error).__name__, message=str(error))
        except OSError as error:
            answer(errno=error.errno, message=error.strerror or str(error), file=str(error.filename))
        except Exception:
            answer(error="", message=traceback.format_exc())


def _listen(tasks: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def _parse_task(content: dict[str, Any]) -> EncodeTask:
    format, chunk = RecordFormat(**content["format"]), Chunk(**content["chunk"])
    return EncodeTask(**content | {"format": format, "chunk": chunk, "limits": tuple(content["limits"])})
