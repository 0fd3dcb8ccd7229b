"""Everything that crosses a process boundary: placements, exit codes, events, step records, and the names of files.

The seams between processes are files; this module is the only place that spells their names and their fields.
Lines of `metrics.jsonl` and `events.jsonl` carry the attempt that wrote them; a reader keeps the last line of a step.
"""

import contextlib
import enum
import errno
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.kept import Address, Kept

# Files of a Hugging Face folder's tokenizer: any of the first makes a folder one, the others say more about it.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
BASE_WEIGHTS = "base weights"  # in data.json, what a run's adapters belong to
MANIFEST = "manifest.json"  # of a checkpoint
HELD_OUT = "held_out"  # the set to evaluate on that was kept back of the training documents

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")  # how a URL begins


class ExitCode(enum.IntEnum):
    """Exit codes of `phalanx` and of its workers."""

    DONE = 0
    FAILED = 1  # an unexpected error; worth another attempt
    CONFIG = 2  # a mistake in the recipe, the data or the run folder; never retried
    UNHEALTHY = 3  # a node is not fit to be trained on: found before the start; another node may be
    STOPPED = 10  # asked to stop by a signal: finished the step, saved, left
    OUT_OF_MEMORY = 11  # never retried unchanged


class Kind(enum.StrEnum):
    """Kinds of lines in `events.jsonl`."""

    RUN_STARTED = "run_started"
    RESOLVED = "resolved"  # an `auto` got its value: key, value, reason
    PLANNED = "planned"  # layout, keys, step_s, why, basis, again
    COMPARED = "compared"  # step, steps, basis, predicted_s, measured_s, terms, off, memory
    ATTEMPT_STARTED = "attempt_started"  # pids by rank
    RESUMED = "resumed"  # step, checkpoint or memory
    MEASURING = "measuring"  # ranks, reason
    MEASURED = "measured"  # devices (rank, model, most, sequences_per_s), seconds
    DEVICES_CHANGED = "devices_changed"  # reason
    MEMORY_LIMITED = "memory_limited"  # most, by rank
    CHECKPOINT_SAVED = "checkpoint_saved"  # step, bytes, seconds
    CHECKPOINT_FAILED = "checkpoint_failed"  # step, reason
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # step, reason
    CHECKPOINT_REFUSED = "checkpoint_refused"  # step, reason
    SHARED = "shared"  # step, shares, parts, why: what an attempt begins with
    ORDERED = "ordered"  # step (the first with this order of transfers), bytes_per_s, compute_s, transfers_s
    RESHARED = "reshared"  # step (the first with these shares), shares, parts, why, before_s, after_s
    EVALUATED = "evaluated"  # step, set, loss, tokens, seconds, scores, unit
    STEP_SKIPPED = "step_skipped"  # step, reason
    ROLLED_BACK = "rolled_back"  # step, from_step, reason, first, last: the steps whose data are passed over
    CORRUPTED = "corrupted"  # step, ranks, parameters, devices, repaired
    SLOW = "slow"  # rank, host, factor, seconds
    INJECTED = "injected"  # rank, step, fault
    WORKER_DIED = "worker_died"  # rank, pid, signal or exit_code, reason; of a signal also what it was doing
    RESTARTED = "restarted"  # attempt
    GAVE_UP = "gave_up"  # reason: why no other attempt is made
    NODE_JOINED = "node_joined"  # node, host, ranks
    NODE_LOST = "node_lost"  # node, host, reason
    INCIDENT = "incident"  # what, done, seconds, step, phases
    SIGNALLED = "signalled"  # signal
    STOPPED = "stopped"  # step
    FINISHED = "finished"  # step, seconds (if rank 0 has said so itself)
    EXPORTED = "exported"  # folder
    PROFILED = "profiled"  # first, last, phases, operators, folder
    MEMORY_RECORDED = "memory_recorded"  # step, peak_bytes, phases, folder
    HEALTH = "health"  # host, after, verdict, findings
    WARNING = "warning"  # message


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of one attempt meet: the TCP store's host and port. The rank that keeps the store has either its
    socket, bound and listening, or is told to `serve`."""

    host: str
    port: int
    listen_fd: int | None = None
    serve: bool = False


@dataclass(frozen=True)
class Placement:
    """Where one worker runs. `device` is "cpu" or an accelerator with its index; `attempt` counts from 1; `threads` of
    the host are the user's choice, 0: this rank's part of the cores; `shared` is the folder in this node's shared
    memory where things outlive the rank, `keeps` whether state does, `kept` what the attempt begins with (None: with
    what is on the disk); of several `nodes` the agent of the next one is at `partner`, the order came in `epoch`."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    device: str
    store: StoreAddress | None  # None: one rank alone
    attempt: int = 1
    threads: int = 0
    shared: str | None = None
    kept: Kept | None = None
    keeps: bool = True
    nodes: int = 1
    partner: Address | None = None
    epoch: int | None = None


@dataclass
class StepRecord:
    """One optimizer step as `metrics.jsonl` holds it. Times in seconds, memory in bytes, loss in nats per token."""

    step: int  # steps done so far: the first step of a run is 1
    attempt: int
    loss: float | None  # None when it is not a finite number
    grad_norm: float | None
    lr: float
    tokens: int  # valid tokens of this step, all ranks
    total_tokens: int  # valid tokens since step 1
    step_s: float
    tokens_per_s: float
    wait_s: float | None  # time this rank waited in collectives; None where the device hides it from the host
    comm_bytes: int  # bytes that rank 0 handed to collectives
    data_s: float  # time spent on making the batches
    mfu: float | None  # model FLOPs over the devices' dense peak; None where no peak is known
    mfu_causal: float | None  # the same with only the causal half of attention counted
    memory_bytes: int  # peak on the worst rank
    skipped: bool = False  # the update was not applied
    shares: list[int] | None = None  # sequences of each rank; None of one rank, and of most steps of very many
    parts: int | list[int] | None = None  # micro-batches of each rank, a list where they differ; None as `shares`
    busy_s: list[float] | None = None  # what each rank worked without waiting; None as `shares`, or where not known
    loss_scale: float | None = None  # what the loss was multiplied by; None where nothing computes in float16
    update_s: float | None = None  # time that rank 0 spent on updates; None on accelerators, which hide it
    time: float = field(default_factory=time.time)  # seconds since the epoch


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password, query."""
    if (found := SCHEME.match(url)) is None:
        return url
    rest = url[found.end() :].partition("?")[0]
    host, slash, path = rest.partition("/")
    return f"{found[0]}{host.rpartition('@')[2]}{slash}{path}"


@dataclass(frozen=True)
class Url:
    """A folder or file at a URL, named as a Path names one; `timeout_s` is for how long its store is tried."""

    text: str
    timeout_s: float

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.text.rstrip('/')}/{name}", self.timeout_s)

    @property
    def name(self) -> str:
        return self.text.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.text.rstrip("/").rpartition("/")[0], self.timeout_s)

    def __str__(self) -> str:
        """Without a user, password or query, as this is shown and recorded."""
        return shown(self.text)


@dataclass(frozen=True)
class RunPaths:
    """File names of a run folder. Of one at a `url`, `root` is a local copy of its records; checkpoints have none."""

    root: Path
    url: Url | None = None

    @property
    def shown(self) -> str:
        """Where a user finds the run."""
        return str(self.root if self.url is None else self.url)

    @property
    def name(self) -> str:
        """What the run is called: the last part of where it is."""
        return self.root.resolve().name if self.url is None else self.url.name

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def versions(self) -> Path:
        return self.root / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path | Url:
        return (self.root if self.url is None else self.url) / "checkpoints"

    @property
    def has_checkpoints(self) -> Path:
        """Exists where there are checkpoints: their folder, or an empty one as a sign that the URL has some."""
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        """What the run is trained on, to notice when it changes."""
        return self.root / "data.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def hf_config(self) -> Path:
        """The config.json of the Hugging Face folder that a run started from."""
        return self.root / "tokenizer" / "config.json"

    @property
    def model_code(self) -> Path:  # the copy of the file that `model.code` names
        return self.root / "model.py"

    @property
    def task_code(self) -> Path:  # that of `task.code`
        return self.root / "task.py"

    @property
    def callback_code(self) -> Path:  # that of `callback.code`
        return self.root / "callback.py"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:  # the id under which Weights & Biases knows this run
        return self.root / "wandb.json"

    @property
    def inside(self) -> Path:  # traces and memory snapshots
        return self.root / "profile"

    def trace(self, rank: int, first: int, last: int) -> Path:
        return self.inside / f"rank-{rank:05d}-steps-{first}-{last}.json.gz"

    def memory(self, rank: int, step: int, suffix: str) -> Path:
        return self.inside / f"memory-rank-{rank:05d}-step-{step}.{suffix}"

    @property
    def hardware(self) -> Path:  # what was measured on the devices of the job
        return self.root / "hardware.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    def limit(self, rank: int) -> Path:
        """How much a rank that has run out of memory may be given."""
        return self.root / "limits" / f"rank-{rank:05d}.json"

    @property
    def suspects(self) -> Path:
        """Devices that have computed or kept something wrong, a line for each time."""
        return self.root / "suspects.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def sign(self) -> Path:
        """By what other nodes know that this folder is node 0's."""
        return self.root / ".sign"

    @property
    def nodes(self) -> Path:
        """What was asked of nodes, and what their checks have found."""
        return self.root / "nodes"

    def node_request(self, node: str) -> Path:
        """What a user asks of a node: to leave it, replace it, or use it again."""
        return self.nodes / f"{node}.json"

    def node_health(self, host: str) -> Path:
        """The results of a host's last check."""
        return self.nodes / f"{host}.health"

    @property
    def launch(self) -> Path:
        """What `phalanx launch` has left for the nodes, and they for it."""
        return self.root / "launch"

    @property
    def launched(self) -> Path:
        """How the run was launched last."""
        return self.launch / "launched.json"

    @property
    def launch_recipe(self) -> Path:
        """The recipe as it was launched, with its overrides."""
        return self.launch / "recipe.yaml"

    @property
    def launch_script(self) -> Path:
        """The job that Slurm was given."""
        return self.launch / "job.sh"

    @property
    def jobs(self) -> Path:
        """Numbers of the jobs that Slurm was given for this run, the newest last."""
        return self.launch / "jobs"

    @property
    def cancelled(self) -> Path:
        """Exists when the run was asked to stop for good."""
        return self.launch / "cancelled"

    @property
    def keeper(self) -> Path:
        """Process and machine that keep a run that was launched without a scheduler; locked while they do."""
        return self.launch / "keeper"

    @property
    def meet(self) -> Path:
        """Where the nodes of a launched run meet."""
        return self.launch / "meet"

    def over(self, start: str) -> Path:
        """How a start of a launched run ended: exit code, `again` or `end`, the step that was saved, who says so."""
        return self.launch / f"over-{start}"

    def node_log(self, node: int) -> Path:
        """What the agent of a node of a launched run says."""
        return self.root / "logs" / f"node-{node}.log"

    def job_log(self, number: str) -> Path:
        """What Slurm and the script of a job say."""
        return self.root / "logs" / f"slurm-{number}.log"

    def epoch(self, number: int) -> Path:
        """On several nodes: who leads them since then."""
        return self.root / "epochs" / f"{number:06d}.json"

    def log(self, attempt: int, rank: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"

    def cause(self, attempt: int, rank: int) -> Path:
        """Why a worker ended, written by itself."""
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.cause.json"

    def flights(self, attempt: int) -> Path:
        """The beginning of the names of what NCCL writes of its last collectives; a rank's number follows."""
        return self.log(attempt, 0).parent / "flight-rank-"

    def logged(self) -> list[int]:
        """The attempts that have left logs here."""
        folders = self.log(1, 0).parent.parent.glob("attempt-*")
        return [int(digits) for folder in folders if (digits := folder.name.removeprefix("attempt-")).isdecimal()]


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line with a single write, so that lines of several writers never mix.

    A number that is not finite (a loss that has run away) is written as null, which is all that JSON can say of it.
    Raises OSError where it does not fit on the disk; the same record may be appended again later.
    """
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    line = (json.dumps(known, allow_nan=False, default=str) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # without it, another writer's line in the making looks torn
        if (end := os.fstat(fd).st_size) and os.pread(fd, 1, end - 1) != b"\n":
            line = b"\n" + line  # a writer died, or the disk was full, within the last line: lose that one alone
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(fd)


def write_event(path: Path, kind: str, attempt: int, **details: Any) -> dict[str, Any]:
    """Append an event (kind, time, attempt and details) to `events.jsonl` and return it."""
    append_line(path, event := {"kind": str(kind), "time": time.time(), "attempt": attempt, **details})
    return event


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new one, never a part. Raises OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():  # root would put a file in a device's place
        raise OSError(errno.EINVAL, "it is a device or a pipe")
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")  # processes of two nodes may have one number
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (creations, renames) survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; a torn line (a writer died in it) is passed over."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def recent_lines(path: Path, least_bytes: int) -> list[dict[str, Any]]:
    """The whole records in the last bytes of a JSON-lines file, at least so many of them if it has them."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - least_bytes)
        file.seek(start)
        lines = file.read().splitlines()[1 if start else 0 :]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                found.append(record)
    return found


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole record of a JSON-lines file, without reading all of it; None where there is none near its end."""
    return next(reversed(recent_lines(path, 2**20)), None)


def split_attempts(
    records: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split step records, in the order of the file, into the trajectory that counts and the steps walked in vain.

    A step that comes again takes back itself and all later steps: they were lost and walked again. A line of an older
    attempt than the newest seen comes from a late writer and is lost too.
    """
    kept: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    newest = 0
    for record in records:
        step, attempt = record.get("step"), record.get("attempt", 1)
        if not isinstance(step, int) or not isinstance(attempt, int):
            continue
        if attempt < newest:
            lost.append(record)
            continue
        newest = attempt
        while kept and kept[-1]["step"] >= step:
            lost.append(kept.pop())
        kept.append(record)
    return kept, sorted(lost, key=lambda record: (record.get("attempt", 1), record["step"]))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The step records of the trajectory that counts, in order of step."""
    return split_attempts(read_lines(path))[0]
