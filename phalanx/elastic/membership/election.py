"""Election of a leader, and agreement on the next member list: votes, a majority, and the epoch's file."""

import errno
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.run_paths import RunPaths
from phalanx.elastic.membership.channel import Message
from phalanx.elastic.membership.member_list import (
    AgentMember,
    MemberList,
    MemberView,
    classify_quorum,
    explain_lost_quorum,
    member_list_to_message,
)
from phalanx.elastic.membership.rendezvous import refresh_listing
from phalanx.recovery import fencing
from phalanx.system.async_call import AsyncCall

VOTES_S = 15.0  # the time of the others to end their ranks and vote; lost ones are not waited for
CLAIM_S = 3.0  # time for a shared file system to create an epoch's file
TIE_S = 60.0  # the same where no node may continue without it: the server may be busy with a checkpoint

Claim = Callable[[int, dict[str, Any]], dict[str, Any] | None]  # as epochs.claim, of a run folder
Outcome = MemberList | str | None  # the list to adopt; or why this agent is fenced; or nothing yet


class Election:
    """Election of a leader, and of the member list after that of `view`. It is the leader's list without lost nodes and
    with joining ones, or, if the leader is lost, that of the lowest remaining node, to which the others `send` their
    votes. `is_silent`: whether no heartbeat of a member arrived for a while. `claim` creates an epoch's file (None:
    there are none); `make_vote` reports the state of this node's ranks, or None while they run; `describe_run` gives
    the contents of an epoch's file."""

    def __init__(
        self,
        view: MemberView,
        send: Callable[[int, Message], None],
        is_silent: Callable[[int], bool],
        claim: Claim | None,
        make_vote: Callable[[], Message | None],
        describe_run: Callable[[MemberList], dict[str, Any]],
    ) -> None:
        self._view, self._send, self._is_silent = view, send, is_silent
        self.claim, self._make_vote, self._describe_run = claim, make_vote, describe_run
        self.votes: dict[int, Message] = {}  # by which this agent came to lead
        self.voters: set[int] = set()  # for this agent; ranks may still run there
        self.joining: dict[int, AgentMember] = {}  # that the next list holds, too
        self.claiming: AsyncCall | None = None
        self.voted: tuple[int, bool] | None = None  # for which node, and whether the ranks' state was included
        self._following: MemberList | None = None  # the list that is being claimed
        self._claimed: tuple[MemberList, bool] | None = None  # what may come next, and whether its file is this agent's
        self._candidate: tuple[int, float] | None = None  # the candidate known here, and since when

    @property
    def has_claimed(self) -> bool:
        """Whether this agent has claimed the next epoch, or is about to."""
        return self.claiming is not None or self._claimed is not None

    def decide(self, now: float) -> Outcome:
        """The member list agreed on so far."""
        why = self._see_claim()
        if why is not None or self.claiming is not None:
            return why
        if not self._view.is_leader:
            return self._elect(now) if self._view.member_list.leader in self._view.lost else None
        # Nodes that are cut off together are not lost in the same turn: wait for those that may be among them.
        if (self.joining or self._view.lost) and not any(map(self._is_silent, self._view.live_nodes())):
            why = self._claim_next(self._view.live_nodes())
        return why if self._claimed is None else self._check_quorum(self._claimed[0])

    def take_vote(self, node: int, vote: Message | None) -> None:
        """Count a vote for this agent, with the state of the voter's ranks once they have ended."""
        self.voters.add(node)
        if vote is not None:
            self.votes[node] = vote

    def hand_on(self, node: int) -> None:
        """Send this node's list to a member with an older one."""
        self._send(node, {"roster": member_list_to_message(self._view.member_list)})
        if self.voted is not None and self.voted[0] == node:
            self.voted = None  # it could not take that vote, and gets it again

    def reset(self) -> None:
        """Reset after a list was adopted."""
        members = self._view.member_list.members
        self.joining = {node: member for node, member in self.joining.items() if member not in members}
        self.voted = self._candidate = self._claimed = None
        self.voters = set()
        if not self._view.is_leader:
            self.votes = {}
        self.stop()

    def stop(self) -> None:
        """Stop waiting for an epoch's file."""
        if self.claiming is not None:
            self.claiming.cancel()
            self.claiming = None

    def _elect(self, now: float) -> Outcome:
        """After the loss of the leader: count votes, or send this node's, at once and again when its ranks have
        ended."""
        view = self._view
        candidate = view.live_nodes()[0]
        if self._candidate is None or self._candidate[0] != candidate:
            self._candidate = candidate, now  # the others may learn only now which node to vote for
        since = self._candidate[1]
        if candidate != view.me.node:
            self._vote_for(candidate)
            return None
        self.take_vote(candidate, self._make_vote())  # again, as it may have got ready for a new division
        voters, late = [node for node in view.live_nodes() if node in self.voters], now > since + VOTES_S
        ended = [node for node in voters if node in self.votes]
        # While ranks end, the epoch is claimed only where the others can continue without this node if it dies first.
        kept = voters if 2 * (len(voters) - 1) > len(view.member_list.nodes) else ended
        why = None
        if candidate in kept and (kept == view.live_nodes() or late):
            why = self._claim_next(kept)
        if self._claimed is None or candidate not in ended or (ended != view.live_nodes() and not late):
            return why
        members = tuple(member for member in view.member_list.members if member.node in ended)
        return self._check_quorum(replace(self._claimed[0], members=members))

    def _vote_for(self, candidate: int) -> None:
        if self.voted == (candidate, True):
            return
        ballot = self._make_vote()
        said = candidate, ballot is not None
        if self.voted != said:
            self.voted = said
            self._send(candidate, {"follow": self._view.member_list.epoch, "ballot": ballot})

    def _claim_next(self, kept: list[int]) -> str | None:
        """Claim the next epoch for `kept` and for those who have joined, where that may be; once. Returns why it may
        not be."""
        if self._claimed is not None or self.claiming is not None:
            return None
        before, of = self._view.member_list, len(self._view.member_list.nodes)
        here = classify_quorum(len(kept), of)
        if here == "minority" or (here == "tie" and self.claim is None):
            return explain_lost_quorum(len(kept), of)
        members = {member.node: member for member in before.members if member.node in kept}
        self._ask_for(before.with_members({**self.joining, **members}.values(), self._view.me.node))
        return None

    def _ask_for(self, following: MemberList) -> None:
        """Create the file of an epoch, where there are such files."""
        if self.claim is None:
            self._claimed = following, False
            return
        me, before = self._view.me, self._view.member_list
        text = {"leader": me.node, "host": me.host, "address": [me.address, me.port]}
        text |= {"from": before.epoch, **self._describe_run(following)}
        patience_s = TIE_S if classify_quorum(self._left(following), len(before.nodes)) == "tie" else CLAIM_S
        self._following = following
        self.claiming = AsyncCall(self.claim, following.epoch, text, timeout_s=patience_s)

    def _see_claim(self) -> str | None:
        """Check for the epoch's file; returns why this agent is fenced, if another one has created it."""
        if self.claiming is None:
            return None
        following = self._following
        assert following is not None
        try:
            if (result := self.claiming.result()) is None:
                return None
            taken, mine = result[0], True
        except (PhalanxError, RuntimeError):  # the file system hangs or refuses: a majority needs none, but to pass one
            taken, mine = None if following.epoch == self._view.member_list.epoch + 1 else {}, False
        self.claiming = None
        if taken is None:
            self._claimed = following, mine
        elif self._passes(taken, following):
            self._ask_for(replace(following, epoch=following.epoch + 1))
        else:
            return "another group of nodes took over the run"
        return None

    def _passes(self, taken: dict[str, Any], following: MemberList) -> bool:
        """Whether this node may take the epoch after one that is `taken`: its claimant may live, and lead it.

        Only one of this very epoch is passed, whom all who have voted here have lost for good: their leader, or one
        lower than whom they vote for. They are a majority, so one of them is in any roster that it makes, and is missed
        there. It needs the file after its own then, the very one asked for now: who comes second finds it made from
        another epoch, and is fenced."""
        view = self._view
        if view.is_leader or taken.get("from") != view.member_list.epoch or type(taken.get("leader")) is not int:
            return False
        lost = taken["leader"] == view.member_list.leader or taken["leader"] < view.me.node
        return lost and classify_quorum(self._left(following), len(view.member_list.nodes)) == "majority"

    def _left(self, following: MemberList) -> int:
        """How many of a roster belong to this one and are not lost."""
        return len([node for node in following.nodes if node in self._view.live_nodes()])

    def _check_quorum(self, following: MemberList) -> MemberList | str:
        """Adopt a list whose epoch was claimed, where enough of its members are left; else returns why this agent is
        fenced."""
        assert self._claimed is not None
        left, of = self._left(following), len(self._view.member_list.nodes)
        here = classify_quorum(left, of)
        if here == "minority" or (here == "tie" and not self._claimed[1]):
            return explain_lost_quorum(left, of)
        return following


# --------------------------------------------------------------------------------------------------------- epoch files
# Epoch files in the run folder: of all candidates for leading an epoch, the one that creates its file wins. A hard link
# with a name that must not exist is atomic, also on network file systems; so when a network splits into two halves of
# the same size, one continues and the other knows that it must not. The file is written before it gets its name, so
# that its creator can be read even if that node died a moment later. Its contents are for those who look for the run:
# the leader and its address; and for its ranks: `attempt` is the oldest whose ranks may still write, and `since` the
# epoch in which that was ordered (`failover.find_active_writers`). `from` is the epoch whose members created it; a job
# that begins with a new epoch has none.


NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # errors of a file system without hard links


def claim(paths: RunPaths, epoch: int, text: dict[str, Any]) -> dict[str, Any] | None:
    """Create the file of an epoch; returns None for its creator, for all others its contents (only its number
    while it is being written, on a file system without hard links). Raises RunError if the run folder cannot be
    written.
    """
    path = paths.epoch(epoch)
    passing = path.with_name(f".{path.stem}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write(passing, {"epoch": epoch, **text})
        try:
            return None if _link(passing, path) else fencing.read_epoch(paths, epoch)
        finally:
            passing.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror}); change the run folder's permissions") from None


def _write(path: Path, text: dict[str, Any]) -> None:
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8"
    ) as file:
        json.dump(text, file)
        file.flush()
        os.fsync(file.fileno())


def _link(passing: Path, path: Path) -> bool:
    """Give a written file its name, unless that exists."""
    try:
        os.link(passing, path)
    except FileExistsError:
        return os.stat(passing).st_nlink > 1  # NFS says so of a link that it has made, where its answer was lost
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            _write(path, json.loads(passing.read_text(encoding="utf-8")))
        except FileExistsError:
            return False
    return True


def read_newest_epoch(paths: RunPaths) -> dict[str, Any] | None:
    """The content of the newest epoch's file (see `fencing.read_newest_epoch`); None for a run folder at a URL."""
    if paths.url is not None:
        return None
    refresh_listing(paths.epoch(1).parent)
    return fencing.read_newest_epoch(paths)


def read_epoch_number(paths: RunPaths) -> int:
    """The number of the newest epoch; 0 without any."""
    return int((read_newest_epoch(paths) or {"epoch": 0})["epoch"])


def read_leader_address(paths: RunPaths) -> tuple[str, int] | None:
    """The address of the leader of the newest epoch, from its file."""
    told = read_newest_epoch(paths)
    try:
        return None if told is None else (str(told["address"][0]), int(told["address"][1]))
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def claim_next(paths: RunPaths, text: dict[str, Any]) -> int:
    """Claim the epoch after the newest, for a job that begins; returns its number. Raises as `claim`."""
    while True:
        epoch = 1 + read_epoch_number(paths)
        if claim(paths, epoch, {"since": epoch, **text}) is None:
            return epoch
