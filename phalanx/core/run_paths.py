"""The files of a run folder, local or at a URL."""

import re
from dataclasses import dataclass
from pathlib import Path

# Files of a Hugging Face tokenizer: any of the first identifies a tokenizer folder, the others are optional.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
IMPORTED = "imported.json"  # beside a first checkpoint that was imported, not written by a run
BASE_WEIGHTS = "base weights"  # key in data.json of the base weights that a run's adapters belong to
MANIFEST = "manifest.json"  # of a checkpoint
HELD_OUT = "held_out"  # name of the evaluation set that was split off from the training documents
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")  # scheme of a URL


def redact_url(url: str) -> str:
    """Remove from a URL what may be secret: user, password, query."""
    if (found := SCHEME.match(url)) is None:
        return url
    rest = url[found.end() :].partition("?")[0]
    host, slash, path = rest.partition("/")
    return f"{found[0]}{host.rpartition('@')[2]}{slash}{path}"


@dataclass(frozen=True)
class Url:
    """A folder or file at a URL, with the interface of a Path; `timeout_s` limits retries of its store."""

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
        """Without user, password and query, since it is shown and recorded."""
        return redact_url(self.text)


@dataclass(frozen=True)
class RunPaths:
    """Paths of a run folder's files. For a run at a `url`, `root` is a local copy of its records, without
    checkpoints."""

    root: Path
    url: Url | None = None

    @property
    def display_name(self) -> str:
        """The run's location as shown to users."""
        return str(self.root if self.url is None else self.url)

    @property
    def name(self) -> str:
        """Name of the run: the last part of its location."""
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
        """A path that exists if there are checkpoints: their folder, or an empty marker if they are at the URL."""
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        """Fingerprints of the data that the run is trained on, to detect changes."""
        return self.root / "data.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def hf_config(self) -> Path:
        """The config.json of the Hugging Face folder that a run started from."""
        return self.root / "tokenizer" / "config.json"

    @property
    def model_code(self) -> Path:  # the copy of the `model.code` file
        return self.root / "model.py"

    @property
    def task_code(self) -> Path:  # the copy of the `task.code` file
        return self.root / "task.py"

    @property
    def optimizer_code(self) -> Path:  # the copy of the file in `optim.name`
        return self.root / "optimizer.py"

    @property
    def schedule_code(self) -> Path:  # the copy of the file in `optim.schedule`
        return self.root / "schedule.py"

    @property
    def callback_code(self) -> Path:  # the copy of the `callback.code` file
        return self.root / "callback.py"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def wandb(self) -> Path:  # the id of this run at Weights & Biases
        return self.root / "wandb.json"

    @property
    def profile(self) -> Path:  # traces and memory snapshots
        return self.root / "profile"

    def trace(self, rank: int, first: int, last: int) -> Path:
        return self.profile / f"rank-{rank:05d}-steps-{first}-{last}.json.gz"

    def memory(self, rank: int, step: int, suffix: str) -> Path:
        return self.profile / f"memory-rank-{rank:05d}-step-{step}.{suffix}"

    @property
    def hardware(self) -> Path:  # measurements of the job's devices
        return self.root / "hardware.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    def memory_limit(self, rank: int) -> Path:
        """Memory limit of a rank that ran out of memory."""
        return self.root / "limits" / f"rank-{rank:05d}.json"

    @property
    def suspects(self) -> Path:
        """Devices with wrong results or corrupted memory, one line for each occurrence."""
        return self.root / "suspects.jsonl"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def node0_marker(self) -> Path:
        """Marker by which other nodes recognize that this folder is node 0's."""
        return self.root / ".sign"

    @property
    def nodes(self) -> Path:
        """Requests to nodes, and results of their health checks."""
        return self.root / "nodes"

    def node_request(self, node: str) -> Path:
        """A user's request to a node: drain, replace, or use it again."""
        return self.nodes / f"{node}.json"

    def node_health(self, host: str) -> Path:
        """Results of a host's last health check."""
        return self.nodes / f"{host}.health"

    @property
    def launch(self) -> Path:
        """Files that `phalanx launch` and the nodes exchange."""
        return self.root / "launch"

    @property
    def launched(self) -> Path:
        """Settings of the last launch."""
        return self.launch / "launched.json"

    @property
    def launch_recipe(self) -> Path:
        """The recipe as launched, with its overrides."""
        return self.launch / "recipe.yaml"

    @property
    def launch_script(self) -> Path:
        """The job script submitted to the scheduler."""
        return self.launch / "job.sh"

    @property
    def jobs(self) -> Path:
        """Ids of the jobs submitted for this run, the newest last."""
        return self.launch / "jobs"

    @property
    def cancelled(self) -> Path:
        """Exists after the run was cancelled."""
        return self.launch / "cancelled"

    @property
    def alerts(self) -> Path:
        """Alerts sent, one line each."""
        return self.root / "alerts.jsonl"

    @property
    def save_request(self) -> Path:
        """Exists while a checkpoint is requested but not started."""
        return self.root / "save-now"

    @property
    def job_supervisor(self) -> Path:
        """Process and machine that supervise a run launched without a scheduler; locked while they do."""
        return self.launch / "keeper"

    @property
    def rendezvous(self) -> Path:
        """Rendezvous of the nodes of a launched run."""
        return self.launch / "meet"

    def start_outcome(self, start: str) -> Path:
        """Outcome of a start of a launched run: exit code, `again` or `end`, the saved step, and the writer."""
        return self.launch / f"over-{start}"

    def node_log(self, node: int) -> Path:
        """Log of a node's agent in a launched run."""
        return self.root / "logs" / f"node-{node}.log"

    def job_log(self, scheduler: str, number: str) -> Path:
        """Log of a scheduler's job."""
        return self.root / "logs" / f"{scheduler}-{number}.log"

    def epoch(self, number: int) -> Path:
        """Epoch file of several nodes: the leader since then."""
        return self.root / "epochs" / f"{number:06d}.json"

    def log(self, attempt: int, rank: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"

    def exit_cause(self, attempt: int, rank: int) -> Path:
        """Exit cause of a rank, written by itself."""
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.cause.json"

    def flight_records(self, attempt: int) -> Path:
        """Path prefix of NCCL's flight records; the rank follows."""
        return self.log(attempt, 0).parent / "flight-rank-"

    def list_logged_attempts(self) -> list[int]:
        """Attempts that have logs in this folder."""
        folders = self.log(1, 0).parent.parent.glob("attempt-*")
        return [int(digits) for folder in folders if (digits := folder.name.removeprefix("attempt-")).isdecimal()]
