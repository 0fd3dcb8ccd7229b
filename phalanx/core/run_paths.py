"""The files of a run folder, local or at a URL."""

import re
from dataclasses import dataclass
from pathlib import Path

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


def redact_url(url: str) -> str:
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
        return redact_url(self.text)


@dataclass(frozen=True)
class RunPaths:
    """File names of a run folder. Of one at a `url`, `root` is a local copy of its records; checkpoints have none."""

    root: Path
    url: Url | None = None

    @property
    def display_name(self) -> str:
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
    def profile(self) -> Path:  # traces and memory snapshots
        return self.root / "profile"

    def trace(self, rank: int, first: int, last: int) -> Path:
        return self.profile / f"rank-{rank:05d}-steps-{first}-{last}.json.gz"

    def memory(self, rank: int, step: int, suffix: str) -> Path:
        return self.profile / f"memory-rank-{rank:05d}-step-{step}.{suffix}"

    @property
    def hardware(self) -> Path:  # what was measured on the devices of the job
        return self.root / "hardware.json"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    def memory_limit(self, rank: int) -> Path:
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
    def node0_marker(self) -> Path:
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
        """The job that the scheduler was given."""
        return self.launch / "job.sh"

    @property
    def jobs(self) -> Path:
        """Numbers of the jobs that the scheduler was given for this run, the newest last."""
        return self.launch / "jobs"

    @property
    def cancelled(self) -> Path:
        """Exists when the run was asked to stop for good."""
        return self.launch / "cancelled"

    @property
    def job_supervisor(self) -> Path:
        """Process and machine that keep a run that was launched without a scheduler; locked while they do."""
        return self.launch / "keeper"

    @property
    def rendezvous(self) -> Path:
        """Where the nodes of a launched run meet."""
        return self.launch / "meet"

    def start_outcome(self, start: str) -> Path:
        """How a start of a launched run ended: exit code, `again` or `end`, the step that was saved, who says so."""
        return self.launch / f"over-{start}"

    def node_log(self, node: int) -> Path:
        """What the agent of a node of a launched run says."""
        return self.root / "logs" / f"node-{node}.log"

    def job_log(self, scheduler: str, number: str) -> Path:
        """What the scheduler and the script of a job say."""
        return self.root / "logs" / f"{scheduler}-{number}.log"

    def epoch(self, number: int) -> Path:
        """On several nodes: who leads them since then."""
        return self.root / "epochs" / f"{number:06d}.json"

    def log(self, attempt: int, rank: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"

    def exit_cause(self, attempt: int, rank: int) -> Path:
        """Why a worker ended, written by itself."""
        return self.root / "logs" / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.cause.json"

    def flight_records(self, attempt: int) -> Path:
        """The beginning of the names of what NCCL writes of its last collectives; a rank's number follows."""
        return self.log(attempt, 0).parent / "flight-rank-"

    def list_logged_attempts(self) -> list[int]:
        """The attempts that have left logs here."""
        folders = self.log(1, 0).parent.parent.glob("attempt-*")
        return [int(digits) for folder in folders if (digits := folder.name.removeprefix("attempt-")).isdecimal()]
