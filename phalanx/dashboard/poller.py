"""The thread that follows the runs for all open pages; its results are published as bytes, once for all of them.

A page subscribes to the list of runs and to the runs that it shows. Only those are followed in full; of the others only
the line in the list is updated. Without pages, files are checked once in IDLE_S.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.records import EventKind
from phalanx.core.run_paths import RunPaths
from phalanx.dashboard.run_curves import CurvePoints
from phalanx.dashboard.run_view import RunView, encode, summarize_run
from phalanx.elastic.supervisor import node_requests
from phalanx.launch import launched_run
from phalanx.report.run_index import CHUNK_BYTES, RunIndex, find_runs
from phalanx.report.status import describe_run

POLL_S = 0.5  # interval between checks of the files of runs, while a page is open
IDLE_S = 3.0
FIND_S = 3.0  # interval between searches for new runs
ASK_S = 3.0  # interval between queries of schedulers and nodes
READ_S = 0.2  # time limit of a poll for reading existing records, so that pages are served meanwhile
SEND_S = 0.1  # that nothing is read for after a page's first sections, so that the server sends them at once
FIRST_BYTES = 1 << 14  # bytes of a new run that are read first
UPDATES = 50  # updates of a run's curves, kept for pages that are behind
RUNS = "runs"  # subscription to the list
CLUSTER, CLUSTER_S = "cluster", 5.0  # event that comes with the list; interval between reads

LEAST_S = 0.8  # interval between summaries of a run
LIST_S = 2.0  # interval between summaries of a running run without new records

Facts = dict[str, Any]
log = logging.getLogger(__name__)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, PhalanxError) else f"its records cannot be read ({type(error).__name__})"


class Subject:
    """A run: its index, its view while a page shows it, and the published sections."""

    def __init__(self, folder: Path) -> None:
        self.id = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        self.index = RunIndex(RunPaths(folder))
        self.points = CurvePoints(self.index)
        self.view: RunView | None = None
        self.known = False  # whether any record was read
        self.summary: Facts | None = None
        self.scheduler: Facts | None = None
        self.nodes: list[dict[str, str]] = []
        self.sections: dict[str, tuple[int, bytes]] = {}  # by name: version and JSON
        self.curves: deque[tuple[int, int, bytes]] = deque(maxlen=UPDATES)  # version, base, rows that changed
        self.drawn = (-1, -1)  # base and number of the published rows
        self.seen: tuple[int, float] = (-1, 0.0)  # version of the index, and time, of the last view
        self.listed: tuple[object, float] = (None, 0.0)  # input of the line in the list, and when it was made

    @property
    def over(self) -> bool:
        """Whether the last event ends the run."""
        kind = self.index.events[-1].get("kind") if self.index.events else None
        return kind in (EventKind.FINISHED, EventKind.EXPORTED)


class Poller:
    """Follows run folders in a thread. `messages` and `subscribe` are for the server's thread; `notify` is called after
    something was published."""

    def __init__(
        self, places: Iterable[Path], notify: Callable[[], None], read_cluster: Callable[[], Facts] | None = None
    ) -> None:
        """`read_cluster`: what is shown of a cluster beside the runs; it may take long."""
        self.subjects: dict[str, Subject] = {}
        self._places, self._notify = list(places), notify
        self._lock = threading.Lock()
        self._version = 0
        self._list: tuple[int, bytes] = (0, b"[]")
        self._listed: list[str] = []  # runs in the list
        self._wanted: dict[str, int] = {}  # subscriptions, by run
        self._wake, self._ending = threading.Event(), threading.Event()
        self._due = {"find": 0.0, "ask": 0.0}
        self._find()
        self._cluster: tuple[int, bytes] = (0, b"")
        work: list[Callable[[], None]] = [self._follow, self._ask]
        work += [] if read_cluster is None else [lambda: self._follow_cluster(read_cluster)]
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=5)

    # ---- the server's side

    def subscribe(self, runs: Iterable[str]) -> None:
        with self._lock:
            for run in runs:
                self._wanted[run] = self._wanted.get(run, 0) + 1
        self._wake.set()

    def unsubscribe(self, runs: Iterable[str]) -> None:
        with self._lock:
            for run in runs:
                self._wanted[run] -= 1
                if not self._wanted[run]:
                    del self._wanted[run]

    def messages(self, runs: Iterable[str], sent: dict[tuple[str, str], tuple[int, int]]) -> list[tuple[str, bytes]]:
        """What was published since what a page was `sent` (updated here): pairs of an event's name and its JSON. What
        a first picture needs comes first."""
        found = []
        with self._lock:
            for run in sorted(runs, key=lambda run: run == RUNS):
                if run == RUNS:
                    if sent.get((RUNS, "")) != (self._list[0], 0):
                        sent[RUNS, ""] = self._list[0], 0
                        found.append((RUNS, self._list[1]))
                    if sent.get((RUNS, CLUSTER), (0, 0)) != (self._cluster[0], 0):
                        sent[RUNS, CLUSTER] = self._cluster[0], 0
                        found.append((CLUSTER, self._cluster[1]))
                    continue
                subject = self.subjects.get(run)
                if subject is None or subject.view is None:
                    continue
                told = [("curves", data) for data in self._new_rows(subject, sent)]
                for name, (version, data) in subject.sections.items():
                    if sent.get((run, name)) != (version, 0):
                        sent[run, name] = version, 0
                        found.append((name, b'{"run":"%s","%s":%s}' % (run.encode(), name.encode(), data)))
                    found, told = (found + told, []) if name == "charts" else (found, told)
                found += told
        return found

    def _new_rows(self, subject: Subject, sent: dict[tuple[str, str], tuple[int, int]]) -> list[bytes]:
        """Updates of a run's curves since what was sent, or all rows if those are not kept."""
        if not subject.curves or subject.view is None:
            return []
        version, base = sent.get((subject.id, "curves"), (0, -1))
        newest, newest_base, _ = subject.curves[-1]
        if version == newest:
            return []
        sent[subject.id, "curves"] = newest, newest_base
        missed = [update for update in subject.curves if update[0] > version]
        if base == newest_base and version >= subject.curves[0][0] - 1 and all(each[1] == base for each in missed):
            return [data for _, _, data in missed]
        return [encode({"run": subject.id, **subject.view.rows(0)})]

    # ---- the thread's side

    def _follow(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            if began >= self._due["find"]:
                self._find()
            self._poll()
            with self._lock:
                watched = bool(self._wanted)
            reading = any(not subject.index.complete for subject in self.subjects.values())
            reading |= any(not subject.known for subject in self.subjects.values())
            pause = max(0.05, READ_S / 2) if reading else POLL_S if watched else IDLE_S
            if not self._ending.is_set():  # the wake-up by `close` may have come during the poll
                self._wake.wait(pause)

    def _find(self) -> None:
        """Find new runs, and forget removed ones."""
        self._due["find"] = time.monotonic() + FIND_S
        try:
            folders = find_runs(self._places)
        except (ConfigError, OSError):  # a file system that is temporarily unavailable
            return
        known = {str(subject.index.paths.root): subject for subject in self.subjects.values()}
        subjects = [known.get(str(folder)) or Subject(folder) for folder in folders]
        with self._lock:
            self.subjects = {subject.id: subject for subject in subjects}

    def _poll(self) -> None:
        self._wake.clear()
        with self._lock:
            wanted = set(self._wanted)
        subjects = sorted(self.subjects.values(), key=lambda subject: subject.id not in wanted)
        now, changed = time.time(), False
        for subject in subjects:
            if subject.id in wanted and subject.view is None:  # its page waits, whatever else there is to read
                self._read_first(subject)
                changed |= self._update(subject, True, now)
        if changed:
            self._notify()
            self._wake.wait(SEND_S)
        until = time.monotonic() + READ_S
        for subject in subjects:  # before any long run is read to its end
            if not subject.known and self._may_read(until):
                changed |= self._read_first(subject)
        for subject in filter(lambda subject: subject.known, subjects):
            if subject.index.complete:
                changed |= subject.index.poll(CHUNK_BYTES)
            while not subject.index.complete and self._may_read(until):
                changed |= subject.index.poll()
            if subject.index.complete:
                subject.points.update()
        now = time.time()
        for subject in filter(lambda subject: subject.known, subjects):
            changed |= self._update(subject, subject.id in wanted, now)
        if self._publish_list(now) or changed:
            self._notify()

    def _may_read(self, until: float) -> bool:
        """Whether existing records are read on: not longer than `until`, and not while a new page waits."""
        return time.monotonic() < until and not self._wake.is_set()

    def _read_first(self, subject: Subject) -> bool:
        """Read the first records of a new run, whose last steps are then shown at once."""
        changed = not subject.known and subject.index.poll(FIRST_BYTES)
        subject.known = True
        return changed

    def _update(self, subject: Subject, watched: bool, now: float) -> bool:
        """Update the sections of a run that a page shows, if there is something new."""
        if not watched:
            if subject.view is not None:
                with self._lock:
                    subject.view, subject.sections, subject.seen, subject.drawn = None, {}, (-1, 0.0), (-1, -1)
                    subject.curves.clear()
            return False
        version, when = subject.seen
        if subject.view is None:
            subject.view = RunView(subject.index, subject.points)
        elif version == subject.index.version and now < when + ASK_S:
            return False
        subject.seen = subject.index.version, now
        with self._lock:
            try:
                sections, first = subject.view.update(now, subject.scheduler, subject.nodes)
            except Exception as error:  # unforeseen records must end neither this thread nor other runs
                log.exception("records of %s cannot be shown", subject.index.paths.root)
                sections, first = {"facts": {"name": subject.index.paths.name, "error": _describe(error)}}, 0
            self._version += 1
            curves = subject.view.curves
            drawn = curves.base, len(curves.columns.get("step", ()))
            if drawn != subject.drawn or first < drawn[1]:
                subject.drawn = drawn
                rows = encode({"run": subject.id, **subject.view.rows(first)})
                subject.curves.append((self._version, curves.base, rows))
            for name, value in sections.items():
                data = encode(value)
                if subject.sections.get(name, (0, b""))[1] != data:
                    subject.sections[name] = self._version, data
        return True

    def _publish_list(self, now: float) -> bool:
        """Publish the list of runs, if a line changed."""
        before = [subject.summary for subject in self.subjects.values()]
        for subject in self.subjects.values():
            if not subject.known:
                subject.summary = {
                    "id": subject.id,
                    "name": subject.index.paths.name,
                    "error": "its records are read soon",
                    "state": "not read yet",
                }
                continue
            basis = subject.index.version, str(subject.scheduler)
            still = subject.summary is not None and subject.summary.get("state") != "running"
            since_s = now - subject.listed[1]
            if since_s < (10 * LIST_S if still else LIST_S) and (subject.listed[0] == basis or since_s < LEAST_S):
                continue
            subject.listed = basis, now
            try:
                facts = subject.view.facts if subject.view is not None else None
                facts = facts or describe_run(subject.index.history(), subject.index.paths, now, subject.scheduler, [])
                subject.summary = summarize_run(subject.id, subject.index, facts)
            except Exception as error:  # such as records of a later release
                log.debug("%s", subject.index.paths.root, exc_info=True)
                subject.summary = {"id": subject.id, "name": subject.index.paths.name, "error": _describe(error)}
        if [subject.summary for subject in self.subjects.values()] == before and self._listed == list(self.subjects):
            return False
        self._listed = list(self.subjects)
        data = encode([subject.summary for subject in self.subjects.values()])
        with self._lock:
            if data == self._list[1]:
                return False
            self._version += 1
            self._list = self._version, data
        return True

    def _follow_cluster(self, read_cluster: Callable[[], Facts]) -> None:
        """A separate thread: the commands of a cluster may take long."""
        while not self._ending.is_set():
            with self._lock:
                watched = bool(self._wanted)
            if watched:
                data = encode(read_cluster())
                with self._lock:
                    changed = data != self._cluster[1]
                    if changed:
                        self._version += 1
                        self._cluster = self._version, data
                if changed:
                    self._notify()
            self._ending.wait(CLUSTER_S if watched else 0.5)

    def _ask(self) -> None:
        """The second thread: queries schedulers and nodes, which may take long."""
        while not self._ending.wait(0.5):
            with self._lock:
                wanted, subjects = set(self._wanted), list(self.subjects.values())
            if not wanted or time.monotonic() < self._due["ask"]:
                continue
            for subject in subjects:
                if subject.over and subject.id not in wanted:
                    continue
                try:
                    subject.scheduler = launched_run.describe_scheduler_state(subject.index.paths)
                    if subject.id in wanted and subject.index.paths.events.exists():
                        subject.nodes = node_requests.list_nodes(subject.index.paths)
                except (PhalanxError, OSError) as error:
                    subject.scheduler = {"by": "process", "id": "?", "state": "not known", "nodes": str(error)}
            self._due["ask"] = time.monotonic() + ASK_S
