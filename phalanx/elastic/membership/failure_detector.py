"""Failure detection: a member of which no heartbeat was heard for `heartbeat_s` is lost."""

import math
import time
from collections.abc import Collection

from phalanx.elastic.membership.heartbeat import DECLARED_LOST, Heartbeat, HeartbeatSender, HeartbeatSocket
from phalanx.elastic.membership.member_list import MemberList, MemberView
from phalanx.elastic.membership.solo import NoNetwork

OVERSLEPT_S = 0.3  # between two turns: who was silent meanwhile may have spoken to nobody, and gets that time back
LATE_MS = 10_000  # an answer to a beat older than that says nothing of now
MEET_S = 10.0  # what a new member gets until its first sign of life


class FailureDetector:
    """Judges the members that this one exchanges heartbeats with; `sender` says that this one lives."""

    def __init__(
        self,
        view: MemberView,
        heartbeats: HeartbeatSocket | NoNetwork,
        sender: HeartbeatSender,
        heartbeat_s: float,
    ) -> None:
        self.heartbeat_s, self.heartbeats, self.sender, self._view = heartbeat_s, heartbeats, sender, view
        now = time.monotonic()
        self.heard_at, self._watched = dict.fromkeys(view.member_list.nodes, now + MEET_S), set[int]()
        self._numbers: dict[str, int] = {}  # the last beat of each token
        self._turn = now

    def wake(self, now: float) -> None:
        """Another turn: where it comes late, its socket may have been full, and nobody is to be judged by that."""
        slept_s, self._turn = now - self._turn, now
        if slept_s > OVERSLEPT_S:
            self.heard_at = {node: at if at > now else min(at + slept_s, now) for node, at in self.heard_at.items()}

    def receive(self, now: float, joining: Collection[str] = ()) -> bool:
        """Take the heartbeats that have come; returns whether one says that the others have given this one up.
        `joining`: tokens of processes that are about to be members."""
        view, gone = self._view, False
        for beat, address in self.heartbeats.receive():
            token = beat.token.hex()
            member = view.member_list.member(beat.node)
            if beat.kind == DECLARED_LOST:
                number = self.sender.next_number()
                gone |= token == view.me.token and number - LATE_MS <= beat.number <= number
            elif member is not None and member.token == token and beat.node not in view.lost:
                if beat.number > self._numbers.get(token, 0):
                    self._numbers[token] = beat.number
                    self.heard_at[beat.node] = now
            elif beat.epoch < view.member_list.epoch and token not in joining:
                answer = Heartbeat(DECLARED_LOST, view.member_list.epoch, beat.node, beat.token, beat.number)
                self.heartbeats.send(answer, address)
        return gone

    def send(self) -> None:
        """Say whom this agent's heartbeats go to."""
        self.sender.send_to(
            self._view.member_list.epoch, [(member.address, member.beats) for member in self._view.list_watched()]
        )

    def find_lost(self, now: float) -> list[int]:
        """Members of which nothing was heard for too long."""
        watched = [member.node for member in self._view.list_watched()]
        for node in set(watched) - self._watched:  # it may not have seen yet that it has to tell this one
            self.heard_at[node] = max(self.heard_at.get(node, now), now + self.heartbeat_s)
        self._watched = set(watched)
        return [node for node in watched if now > self.heard_at.get(node, now) + self.heartbeat_s]

    def due_s(self) -> float:
        """Seconds until one of them is lost, if nothing is heard of it before."""
        heard = [self.heard_at.get(member.node, math.inf) for member in self._view.list_watched()]
        return min(heard, default=math.inf) + self.heartbeat_s - time.monotonic()

    def is_silent(self, node: int) -> bool:
        """Whether a member has been silent for half of the time after which it is lost."""
        silent_s = time.monotonic() - self.heard_at.get(node, 0.0)
        return node != self._view.me.node and silent_s > self.heartbeat_s / 2

    def reset(self, before: MemberList) -> None:
        """Judge the members of a new list; those of the list `before` it have been heard now, others are to come."""
        now, after = time.monotonic(), self._view.member_list
        self.heard_at = {
            member.node: now if before.member(member.node) == member else now + MEET_S for member in after.members
        }

    def close(self) -> None:
        self.sender.close()
        self.heartbeats.close()
