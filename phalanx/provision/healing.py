"""Healing of unhealthy nodes: reset, reboot or replace, decided by pure functions from what Slurm says of them.

Slurm's state of a node is the channel: a node's monitor drains it with the severity in the reason, and a person
requests the same by HyperPod's reasons, `Action:Reboot` and `Action:Replace`. Nothing is done while jobs run on a node
that lives.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from phalanx.core.errors import PhalanxError
from phalanx.health.findings import Severity
from phalanx.provision.config import HealthPolicy
from phalanx.provision.monitor import REASON
from phalanx.provision.slurm_control import SlurmNodeView
from phalanx.provision.steps import NodesFailed

NO_ANSWER = "its machine does not answer"
AGAIN_S = 3600.0  # a problem that recurs within it was not fixed
_BY_MONITOR = re.compile(rf"{REASON} (reset|reboot|isolate)\b")
_BY_PERSON = {"Action:Reboot": Severity.REBOOT, "Action:Replace": Severity.ISOLATE}  # exactly so, as in HyperPod


class HealAction(StrEnum):
    """What cures a node, the mildest first."""

    REJOIN = "restart Slurm's daemon of"
    RESET = "reset the GPUs of"
    REBOOT = "reboot"
    REPLACE = "replace"


_ORDER = list(HealAction)
_ACTIONS = {
    Severity.RESET: HealAction.RESET,
    Severity.REBOOT: HealAction.REBOOT,
    Severity.ISOLATE: HealAction.REPLACE,
}


@dataclass(frozen=True)
class Heal:
    """An action on a node; `requested`: by a person, which no policy holds back."""

    node: str
    action: HealAction
    reason: str
    requested: bool = False


def find_heals(
    views: Mapping[str, SlurmNodeView],
    dead: Collection[str],
    history: Sequence[tuple[float, Heal]] = (),
    now_s: float = 0.0,
) -> list[Heal]:
    """Find the actions for unhealthy nodes. `dead`: machines that do not run or answer; `history`: earlier actions
    and their times. An action that did not help within an hour is followed by a stronger one."""
    found = []
    for name, view in sorted(views.items()):
        heal = _find_heal(view, name in dead)
        if heal is None:
            continue
        recent = [_ORDER.index(done.action) for at, done in history if done.node == name and now_s - at < AGAIN_S]
        if recent and not heal.requested and heal.action != HealAction.REPLACE:
            stronger = min(max(max(recent) + 1, _ORDER.index(heal.action)), len(_ORDER) - 1)
            heal = Heal(name, _ORDER[stronger], heal.reason)
        found.append(heal)
    return found


def _find_heal(view: SlurmNodeView, dead: bool) -> Heal | None:
    if dead:
        return Heal(view.name, HealAction.REPLACE, NO_ANSWER)
    if view.reason in _BY_PERSON and not view.busy and not view.usable:
        action = _ACTIONS[_BY_PERSON[view.reason]]
        return Heal(view.name, action, f"requested by {view.reason}", requested=True)
    by_monitor = _BY_MONITOR.match(view.reason)
    if by_monitor and not view.usable and not view.busy:
        return Heal(view.name, _ACTIONS[Severity(by_monitor[1])], view.reason)
    if view.silent and view.word == "down":
        return Heal(view.name, HealAction.REJOIN, "its slurmd does not answer")
    return None


def hold_back(heals: Sequence[Heal], workers: int) -> str | None:
    """Why automatic healing stops: more than half of the nodes at once are rather a fault of the network, or of the
    check. None where it may act."""
    sick = [heal for heal in heals if not heal.requested]
    if len(sick) > max(1, workers // 2):
        return (
            f"{len(sick)} of {workers} nodes are unhealthy at once, which is rather a fault of the network or of a "
            "check; nothing is done automatically (`phalanx cluster replace` does)"
        )
    return None


class HealedCluster(Protocol):
    """Interface of a cluster for the healer."""

    def look(self) -> tuple[dict[str, SlurmNodeView], set[str]]:
        """What Slurm says of the workers, and those whose machine does not answer."""

    def carry_out(self, heal: Heal) -> None:
        """Do it. Raises PhalanxError, of which NodesFailed names other nodes, where this one was healed."""


@dataclass
class Healer:
    """Looks at a cluster again and again. `approve` asks a person, for the policy `ask`."""

    cluster: HealedCluster
    policy: HealthPolicy
    report: Callable[[str, str], None]
    approve: Callable[[Heal], bool]
    history: list[tuple[float, Heal]] = field(default_factory=list)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def look(self, now_s: float) -> list[Heal]:
        """Check the nodes once; returns the actions taken. Actions that need agreement are reported once."""
        try:
            views, dead = self.cluster.look()
        except (PhalanxError, OSError) as error:  # its controller may be away for minutes
            self._tell("", "not seen", f"the cluster cannot be inspected: {error}")
            return []
        self._told.discard(("", "not seen"))
        heals = find_heals(views, dead, self.history, now_s)
        self._told &= {(heal.node, heal.reason) for heal in heals} | {("", "held back"), ("", "others")}
        if (why := hold_back(heals, len(views))) is not None:
            self._tell("", "held back", why)
            heals = [heal for heal in heals if heal.requested]
        done = []
        for heal in heals:
            if not heal.requested and self.policy != HealthPolicy.AUTOMATIC and (heal.node, heal.reason) in self._told:
                continue
            if not heal.requested and self.policy == HealthPolicy.TELL:
                self._tell(heal.node, heal.reason, f"unhealthy ({heal.reason}); should: {heal.action} it")
                continue
            if not heal.requested and self.policy == HealthPolicy.ASK and not self.approve(heal):
                self._tell(heal.node, heal.reason, f"left as it is ({heal.reason})")
                continue
            self.report(heal.node, f"{heal.action} it: {heal.reason}")
            try:
                self.cluster.carry_out(heal)
            except NodesFailed as error:
                if not error.nodes or heal.node in error.nodes:
                    self._tell(heal.node, heal.reason, f"not healed: {error}")
                    continue
                self._tell("", "others", f"{heal.node} is healed, but other nodes are not: {error}")
            except (PhalanxError, OSError) as error:
                self._tell(heal.node, heal.reason, f"not healed: {error}")
                continue
            self.history.append((now_s, heal))
            done.append(heal)
        return done

    def _tell(self, node: str, key: str, sentence: str) -> None:
        if (node, key) not in self._told:
            self._told.add((node, key))
            self.report(node, sentence)
