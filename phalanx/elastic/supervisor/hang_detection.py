"""Hangs of a job on several nodes: what each agent tells of its ranks' pulses, and what the leader makes of it.

Whoever is behind, of all ranks, is to blame, and not whoever is still on some node: so each agent says what it sees,
and the one that leads judges. Nobody is judged before all nodes that have ranks have spoken, and lately.
"""

import math
import time
from collections.abc import Collection
from dataclasses import astuple

from phalanx.core.progress_page import RankProgress
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.node.watchdog import Hang, HangTimeouts, ProcessStatus, ProgressReport

STALE_S = 3.0  # what was said before says nothing of now
AGAIN_S = 10.0  # what agents get to end an attempt of which ranks were found to hang


def encode_report(attempt: int, report: ProgressReport) -> Message:
    return {
        "attempt": attempt,
        "beats": [astuple(beat) for beat in report.beats],
        "signs": {str(rank): astuple(signs) for rank, signs in report.statuses.items()},
        "patience": astuple(report.timeouts),
    }


def decode_report(message: Message) -> tuple[int, ProgressReport]:
    """The attempt that a word is of, and the word."""
    rows = [[*row[:-1], row[-1] and tuple(row[-1])] for row in message["beats"]]
    signs = {int(rank): ProcessStatus(*row) for rank, row in message["signs"].items()}
    return int(message["attempt"]), ProgressReport(
        tuple(RankProgress(*row) for row in rows), signs, HangTimeouts(*message["patience"])
    )


class JobHangDetector:
    """The words of all nodes, by the leader; of one attempt at a time."""

    def __init__(self) -> None:
        self._attempt = 0
        self._reports: dict[int, tuple[float, ProgressReport]] = {}
        self._next = 0.0

    def add_report(self, node: int, message: Message) -> None:
        """Take what an agent says."""
        attempt, word = decode_report(message)
        if attempt > self._attempt:
            self._attempt, self._reports, self._next = attempt, {}, 0.0
        if attempt == self._attempt:
            self._reports[node] = time.monotonic(), word

    def find_hang(self, attempt: int, nodes: Collection[int]) -> Hang | None:
        """Whether ranks of an attempt hang, of which `nodes` still have some."""
        now = time.monotonic()
        if attempt != self._attempt or now < self._next or not nodes:
            return None
        if any(node not in self._reports or self._reports[node][0] < now - STALE_S for node in nodes):
            return None
        words = [self._reports[node][1] for node in nodes]
        beats = sorted((beat for word in words for beat in word.beats), key=lambda beat: beat.rank)
        signs = {rank: each for word in words for rank, each in word.statuses.items()}
        # A node that is new knows of no attempt before: its ranks may have to compile what others have compiled.
        known = [math.inf if word.timeouts.before_s is None else word.timeouts.before_s for word in words]
        patience = words[known.index(max(known))].timeouts
        hang = ProgressReport(tuple(beats), signs, patience).find_hang()
        if hang is not None:
            self._next = now + AGAIN_S
        return hang
