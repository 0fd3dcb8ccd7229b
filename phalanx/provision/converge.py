"""Convergence of a cluster to its description: nodes are launched, configured, provisioned and handed to Slurm, all
nodes of a step at the same time, with the state on disk after each.

Whatever is interrupted is continued by the next call: a step that may have begun is done again, and each can be.
"""

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NoReturn

from phalanx.core.errors import RunError
from phalanx.provision import lifecycle
from phalanx.provision.config import DeepCheck, NodeRole
from phalanx.provision.deep_checks import check_devices, find_broken_links
from phalanx.provision.links import MOST_MEASURED, forget_node, list_measured, measure_links, record_rates
from phalanx.provision.machines import Machines, append_log, pack_files, run_on
from phalanx.provision.slurm_control import SlurmControl
from phalanx.provision.slurm_files import (
    DAEMONS,
    HOSTS,
    HOSTS_BEGIN,
    HOSTS_END,
    MEASURE,
    MONITOR_PID,
    SITE_CONF,
    describe_facts,
    digest_files,
    digest_scripts,
    make_node_files,
)
from phalanx.provision.state import ClusterFolder, ClusterState, ClusterStatus, NodeRecord, NodeStatus, Stage
from phalanx.provision.steps import NodesFailed, Step, StepKind, mark_lost, plan_nodes, plan_steps

AT_ONCE = 8  # nodes that are worked on at the same time
LIFECYCLE_S, CONFIGURE_S, JOIN_S = 3600.0, 900.0, 120.0
Report = Callable[[str, str], None]  # (node, or "" for the cluster; sentence)


class Convergence:
    """The work on one cluster. `report` gets progress; `keep_failed`: nodes whose lifecycle script fails stay."""

    def __init__(
        self, folder: ClusterFolder, state: ClusterState, machines: Machines, report: Report, keep_failed: bool = True
    ) -> None:
        self.folder, self.state, self.machines = folder, state, machines
        self.report, self.keep_failed = report, keep_failed
        self.failures: dict[str, str] = {}

    @property
    def control(self) -> SlurmControl:
        """Slurm's commands, on the controller."""
        controller = self.state.controller
        return SlurmControl(self.machines, controller, self.folder.log(controller.name))

    def converge(self) -> None:
        """Do all that is left. Raises RunError with every node that failed; the others are in service."""
        self.failures = {}
        self._find_living()
        before, self.state.nodes = self.state.nodes, plan_nodes(self.state.config, self.state.nodes)
        wanted, surplus = self.state.nodes, [node for node in before if node not in self.state.nodes]
        self.state.nodes = [*wanted, *surplus]
        self.save()
        for node in surplus:
            self.terminate(node)
        self.state.nodes = wanted
        self.save()
        self.machines.prepare(self.state)
        self._do_step(StepKind.LAUNCH, self._launch)
        self._check_controller()
        self.configure_changed()
        self._do_step(StepKind.PROVISION, self._provision)
        self._measure_links()
        self._join()
        self._finish()

    def save(self) -> None:
        """Write the state."""
        self.folder.save(self.state)

    # ------------------------------------------------------------------------------------------------------- stages

    def _find_living(self) -> None:
        launched = [node for node in self.state.nodes if node.stage != Stage.ABSENT]
        alive = [node.name for node in launched if self.machines.is_alive(node)]
        for node in mark_lost(self.state.nodes, alive):
            self.report(node.name, "does not answer, and is made again")

    def _due(self, kind: StepKind) -> list[NodeRecord]:
        steps = {step.kind: step for step in plan_steps(self.state.nodes, ())}
        names = steps.get(kind, Step(kind, ())).nodes
        return [node for node in self.state.nodes if node.name in names and node.name not in self.failures]

    def _do_step(self, kind: StepKind, work: Callable[[NodeRecord], None]) -> None:
        self._each(self._due(kind), work)

    def _each(self, nodes: Sequence[NodeRecord], work: Callable[[NodeRecord], None]) -> None:
        """Work on nodes at the same time; the state is written after each. A failed one is noted, and left alone."""
        if not nodes:
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            futures = {pool.submit(work, node): node for node in nodes}
            for future in as_completed(futures):
                node = futures[future]
                try:
                    future.result()
                    node.reason = ""
                except RunError as error:
                    node.status, node.reason = NodeStatus.FAILURE, str(error).splitlines()[0]
                    self.failures[node.name] = str(error)
                    self.report(node.name, f"failed: {error}")
                self.save()

    def _launch(self, node: NodeRecord) -> None:
        node.status, node.instance = NodeStatus.PENDING, f"i-{secrets.token_hex(8)}"
        self.machines.launch(self.state, node)
        output = run_on(self.machines, node, MEASURE, self.folder.log(node.name))
        node.facts = node.facts | describe_facts(output)
        node.hostname = output.strip().splitlines()[-1].strip()
        node.launched_at, node.stage = time.time(), Stage.LAUNCHED
        self.report(node.name, f"launched at {node.address}")

    def _check_controller(self) -> None:
        controller = self.state.controller
        if controller.stage == Stage.ABSENT:
            self._fail(f"the controller {controller.name} could not be launched: {self.failures.get(controller.name)}")

    def configure_changed(self) -> None:
        """Write Slurm's files where they differ, and restart its daemons there."""
        key = self.folder.path / "munge.key"
        if not key.exists() or not key.stat().st_size:
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))
        scripts = self.scripts()
        there = [node for node in self.state.nodes if node.stage != Stage.ABSENT]
        files = {
            node.name: make_node_files(self.state, node, key.read_bytes(), scripts, self.machines.SLURMD_TIMEOUT_S)
            | self.machines.extra_files()
            for node in there
        }
        digests = {name: digest_files(each) for name, each in files.items()}

        def configure(node: NodeRecord) -> None:
            packed = pack_files(files[node.name])
            log = self.folder.log(node.name)
            controls = node is self.state.controller
            joined = node.stage == Stage.JOINED
            script = _CONFIGURE + f"sh {DAEMONS} restart munged\n" * (not joined)
            if controls:
                script += f"sh {DAEMONS} restart slurmctld\n"
            elif joined and self._is_worker(node):
                script += f"sh {DAEMONS} restart slurmd\n"
            daemon = "slurmctld" if controls else "slurmd"
            run_on(self.machines, node, f"daemon={daemon}\n{script}", log, CONFIGURE_S, packed)
            node.config_digest = digests[node.name]
            if not joined:
                node.stage = Stage.CONFIGURED if node.stage == Stage.LAUNCHED else node.stage
                self.report(node.name, "configured")

        controller = self.state.controller
        changed = [node for node in there if node.config_digest != digests[node.name]]
        self._each([node for node in changed if node is controller], configure)
        if controller.name in self.failures:
            self._fail(f"the controller could not be configured: {self.failures[controller.name]}")
        self._each([node for node in changed if node is not controller], configure)

    def scripts(self) -> dict[str, bytes]:
        """The lifecycle scripts that this cluster has; none without."""
        return lifecycle.fetch_scripts(str(self.folder.lifecycle)) if self.folder.lifecycle.is_dir() else {}

    def _provision(self, node: NodeRecord) -> None:
        scripts = self.scripts()
        if self.state.config.lifecycle is not None and scripts:
            self._run_lifecycle(node, scripts)
        if DeepCheck.STRESS in self.state.config.group(node.group).deep_checks:
            node.status = NodeStatus.DEEP_HEALTH_CHECK
            self.report(node.name, "deep health check")
            check_devices(self.machines, node, self.folder.log(node.name))
        node.stage = Stage.PROVISIONED
        self.report(node.name, "provisioned")

    def _run_lifecycle(self, node: NodeRecord, scripts: dict[str, bytes]) -> None:
        config = self.state.config.lifecycle
        assert config is not None
        digest = digest_scripts(scripts, self.state.software)
        script = lifecycle.make_run_script(config.on_create, digest)
        output = run_on(self.machines, node, script, self.folder.log(node.name), LIFECYCLE_S)
        code, output, places = lifecycle.read_exit_code(output)
        if code != 0:
            said = lifecycle.explain_failure(output, scripts, places)
            if not self.keep_failed:
                self.machines.terminate(self.state, node)
                node.stage = Stage.ABSENT
            kept = "the node is kept: correct the script, and repeat the command" if self.keep_failed else "removed"
            raise RunError(
                f"{config.on_create} ended with code {code} on {node.name} ({kept}; log: "
                f"{self.folder.log(node.name)}); its last lines:\n{said}"
            )

    def _measure_links(self) -> None:
        """Measure the links of new workers, where the machines are likely to have several switches, or a group asks for
        the check of its connections."""
        asked = [group.name for group in self.state.config.groups if DeepCheck.CONNECTIVITY in group.deep_checks]
        workers = [
            node
            for node in self.state.nodes
            if self._is_worker(node)
            and (self.machines.OWN_HARDWARE or node.group in asked)
            and node.stage in (Stage.PROVISIONED, Stage.JOINED)
            and node.name not in self.failures
        ]
        new = [node for node in workers if node.name not in list_measured(self.state.links)]
        if not new or len(workers) < 2:
            return
        broken = self.measure_links(workers, again=False)
        for node in new:
            if node.name in broken and node.group in asked and node.stage == Stage.PROVISIONED:
                node.status, node.reason, node.stage = NodeStatus.FAILURE, broken[node.name], Stage.CONFIGURED
                self.failures[node.name] = broken[node.name]

    def measure_links(self, nodes: Sequence[NodeRecord], again: bool = True) -> dict[str, str]:
        """Let nodes exchange data with each other; Slurm's topology follows what is measured. `again`: links that are
        known are measured again, which needs nodes without jobs. Returns a sentence for each node that does not reach
        another."""
        if len(nodes) > MOST_MEASURED:
            self.report("", f"the links of {len(nodes)} nodes are not measured (at most {MOST_MEASURED}), so Slurm's "
                        "topology follows the groups")  # fmt: skip
            return {}
        self.report("", f"measuring the links of {len(nodes)} nodes")
        probes = measure_links(self.machines, nodes)
        known = {} if again else self.state.links
        self.state.links = self.state.links | record_rates(nodes, probes) | known
        broken = find_broken_links(nodes, probes)
        for sentence in dict.fromkeys(broken.values()):
            self.report("", sentence)
        self.configure_changed()
        return broken

    def _is_worker(self, node: NodeRecord) -> bool:
        return self.state.config.group(node.group).role == NodeRole.WORKER

    def _join(self) -> None:
        due = self._due(StepKind.JOIN)
        if not due:
            return
        self.control.wait_ready(JOIN_S)

        def start(node: NodeRecord) -> None:
            log = self.folder.log(node.name)
            run_on(
                self.machines,
                node,
                f"sh {DAEMONS} restart slurmd; {make_monitor_command(self.machines, node.name)}",
                log,
            )

        for node in due:
            if not self._is_worker(node):
                self._mark_joined(node.name)
        workers = [node for node in due if self._is_worker(node) and node.stage == Stage.PROVISIONED]
        self._each(workers, start)
        started = [node.name for node in workers if node.name not in self.failures]
        self.control.wait_usable(started, JOIN_S, self._mark_joined)

    def _mark_joined(self, name: str) -> None:
        node = self.state.node(name)
        node.stage, node.status, node.reason = Stage.JOINED, NodeStatus.RUNNING, ""
        self.report(name, "in service")
        self.save()

    def _finish(self) -> None:
        if self.failures:
            self._fail("\n".join(self.failures.values()), self.failures)
        self.state.status, self.state.message = ClusterStatus.IN_SERVICE, ""
        self.save()

    def _fail(self, message: str, nodes: Collection[str] = ()) -> NoReturn:
        self.state.status, self.state.message = ClusterStatus.FAILED, message
        self.save()
        raise NodesFailed(message, nodes)

    # ------------------------------------------------------------------------------------------------- single nodes

    def drain(self, names: Sequence[str], reason: str, timeout_s: float) -> None:
        """Drain nodes that Slurm has, and wait until no job runs there."""
        views = self.control.query_nodes() if self.machines.is_alive(self.state.controller) else {}
        there = [name for name in names if name in views and not views[name].silent]
        if there:
            self.report("", f"draining {', '.join(there)}")
            self.control.drain(there, reason)
            self.control.wait_drained(there, timeout_s)

    def terminate(self, node: NodeRecord) -> None:
        """Remove a node and its record's identity."""
        node.status = NodeStatus.SHUTTING_DOWN
        self.save()
        try:
            self.machines.terminate(self.state, node)
        except RunError as error:
            self.report(node.name, str(error))
        self.state.links = forget_node(self.state.links, node.name)
        node.stage, node.status, node.config_digest = Stage.ABSENT, NodeStatus.NOT_FOUND, ""
        self.report(node.name, "removed")
        append_log(self.folder.log(node.name), "removed")
        self.save()

    def replace(self, node: NodeRecord, reason: str) -> None:
        """Remove a node, whatever runs there, and mark it to be made again by `converge`."""
        views = self.control.query_nodes()
        if node.name in views and views[node.name].word != "down":
            self.control.mark_down([node.name], reason)
        self.terminate(node)

    def reboot(self, node: NodeRecord, reason: str) -> None:
        """Restart a node whose disk stays, and mark it to join again."""
        if node.name in self.control.query_nodes():
            self.control.mark_down([node.name], reason)
        node.status = NodeStatus.SYSTEM_UPDATING
        self.save()
        self.machines.reboot(self.state, node)
        node.stage, node.config_digest = Stage.LAUNCHED, ""
        self.report(node.name, "rebooted")
        self.save()


# The archive arrives on standard input. Packages are installed only where a daemon is missing.
_CONFIGURE = (
    """
set -e
missing=
for tool in munged $daemon scontrol; do
  PATH=$PATH:/usr/sbin command -v $tool >/dev/null || missing="$missing $tool"
done
if [ -n "$missing" ]; then
  if ! command -v apt-get >/dev/null; then
    echo "the programs$missing are missing, and no apt-get to install them; install Slurm and munge"
    exit 1
  fi
  [ -d /run/systemd/system ] || export RUNLEVEL=1
  export DEBIAN_FRONTEND=noninteractive
  mkdir -p /var/lib/phalanx
  new=
  for package in munge slurm-client $daemon; do
    dpkg-query -W -f '${Status}' $package 2>/dev/null | grep -q ' installed$' || new="$new $package"
  done
  [ -f /var/lib/phalanx/installed ] || echo $new >/var/lib/phalanx/installed
  install="apt-get install -q -y --no-install-recommends munge slurm-client $daemon"
  $install </dev/null >/tmp/phalanx-apt.log 2>&1 || {
    apt-get update -q </dev/null >/dev/null 2>&1 || true
    $install </dev/null >/tmp/phalanx-apt.log 2>&1 || {
      echo "Slurm could not be installed: $(grep -m1 '^E:' /tmp/phalanx-apt.log || tail -1 /tmp/phalanx-apt.log)"
      exit 1
    }
  }
  rm -f /tmp/phalanx-apt.log
fi
mkdir -p /run/phalanx /var/lib/phalanx
key=/etc/munge/munge.key
[ ! -f $key ] || [ -f $key.before ] || cp -p $key $key.before
tar -x -p -C / -f - 2>/tmp/phalanx-tar.log || {
  echo "files could not be written: $(tail -1 /tmp/phalanx-tar.log)"
  exit 1
}
rm -f /tmp/phalanx-tar.log
"""
    # Slurm's commands complain of an empty file.
    + f"[ -f {SITE_CONF} ] || echo '# of the administrator: never changed by `phalanx cluster`' >{SITE_CONF}\n"
    f"sed -i '/^{HOSTS_BEGIN}/,/^{HOSTS_END}/d' /etc/hosts\ncat {HOSTS} >>/etc/hosts\n"
)


def make_monitor_command(machines: Machines, node: str) -> str:
    """Shell words that start the health monitor of a node, in place of the one before."""
    return (
        f"kill $(cat {MONITOR_PID} 2>/dev/null) 2>/dev/null; mkdir -p /var/log/phalanx; "
        f"setsid {machines.python()} -c 'from phalanx.provision.monitor import main; main()' {node} </dev/null "
        ">>/var/log/phalanx/monitor.log 2>&1 & "
        f"echo $! >{MONITOR_PID}"
    )
