"""Beats that an agent's own process sends for it: they go on while the agent is busy, and no longer than it lives."""

import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from phalanx.core.placement import Placement
from phalanx.elastic.membership import heartbeat
from phalanx.elastic.membership.heartbeat import (
    EVERY_S,
    LIVES,
    Address,
    Heartbeat,
    HeartbeatSenderProcess,
    HeartbeatSocket,
)
from phalanx.elastic.membership.member_list import AgentMember
from phalanx.system.fork import fork
from tests.helpers import run_ranks, wait_until

SECRET = "sixteen characters"
ME = AgentMember(3, "here", "00" * 8, "127.0.0.1", 1, 1, (("cpu", "any", True),))


class Aloud:
    """The plain twin: an agent that says itself that it lives, whenever it comes round."""

    def __init__(self, me: AgentMember, beats: HeartbeatSocket) -> None:
        self.me, self.beats, self.due, self.count = me, beats, 0.0, 0

    def next_number(self) -> int:
        return self.count

    def send_to(self, epoch: int, to: Sequence[Address]) -> None:
        if time.monotonic() < self.due:
            return
        self.due, self.count = time.monotonic() + EVERY_S, self.count + 1
        for address in to:
            beat = Heartbeat(LIVES, epoch, self.me.node, bytes.fromhex(self.me.token), self.count)
            self.beats.send(beat, address)

    def close(self) -> None:
        self.due = float("inf")


def bound() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


class Listener:
    def __init__(self) -> None:
        self.beats = HeartbeatSocket(bound(), SECRET)
        self.address: Address = self.beats.socket.getsockname()

    def heard(self) -> list[Heartbeat]:
        return [beat for beat, _ in self.beats.receive()]

    def within(self, seconds: float) -> list[Heartbeat]:
        """What comes in the next seconds; what has come before is let go."""
        self.heard()
        time.sleep(seconds)
        return self.heard()


def speaking() -> tuple[HeartbeatSenderProcess, Listener]:
    ear = Listener()
    mine = HeartbeatSenderProcess(ME, HeartbeatSocket(bound(), SECRET))
    mine.send_to(7, [ear.address])
    wait_until(lambda: bool(ear.heard()), timeout_s=20)
    return mine, ear


def while_the_agent_sleeps(placement: Placement) -> list[Any]:
    mine, ear = speaking()
    try:
        found = ear.within(2.0)  # in which nobody comes round
        return [[beat.epoch, beat.node, beat.kind == LIVES] for beat in found[:1]] + [[b.number for b in found]]
    finally:
        mine.close()


def test_they_go_on_while_the_agent_is_busy() -> None:
    what, numbers = run_ranks(while_the_agent_sleeps, 1)[0]
    assert what == [7, 3, True]
    assert len(numbers) >= 5  # of twenty; the machine may be busy
    assert numbers == sorted(set(numbers))


def until_it_is_stuck(placement: Placement) -> list[int]:
    heartbeat.STUCK_S = 0.5
    mine, ear = speaking()
    try:
        time.sleep(0.6)
        stuck = len(ear.within(1.0))
        mine.send_to(7, [ear.address])
        again = len(ear.within(0.4))
        mine.send_to(8, [])
        time.sleep(0.2)
        return [stuck, again, len(ear.within(0.3))]
    finally:
        mine.close()


def test_an_agent_that_does_not_come_round_is_no_longer_spoken_for() -> None:
    stuck, again, nobody = run_ranks(until_it_is_stuck, 1)[0]
    assert (stuck, nobody) == (0, 0)
    assert again > 0


def while_it_is_stopped(placement: Placement) -> list[int]:
    """A forked agent is stopped, goes on, loses its child, and is killed."""
    ear = Listener()

    def agent() -> int:
        mine = HeartbeatSenderProcess(ME, HeartbeatSocket(bound(), SECRET))
        while True:
            mine.send_to(1, [ear.address])
            time.sleep(0.05)

    pid, pidfd = fork(agent)
    os.close(pidfd)
    wait_until(lambda: bool(ear.heard()), timeout_s=20)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.3)
    found = [len(ear.within(1.0))]
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: bool(ear.heard()), timeout_s=20)
    (child,) = (int(name) for name in open(f"/proc/{pid}/task/{pid}/children").read().split())  # noqa: SIM115
    os.kill(child, signal.SIGKILL)
    time.sleep(0.2)
    ear.heard()
    wait_until(lambda: bool(ear.heard()), timeout_s=20)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(0.2)
    return [*found, len(ear.within(0.5))]


def test_a_stopped_agent_is_silent_a_dead_one_too_and_a_dead_child_is_replaced() -> None:
    assert run_ranks(while_it_is_stopped, 1)[0] == [0, 0]


def test_the_twin_speaks_only_when_it_comes_round() -> None:
    ear, mine = Listener(), Aloud(ME, HeartbeatSocket(bound(), SECRET))
    for _ in range(2):
        mine.send_to(1, [ear.address])
    wait_until(lambda: bool(ear.heard()), timeout_s=5)
    assert mine.next_number() == 1
    assert ear.within(0.3) == []
