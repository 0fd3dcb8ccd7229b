"""Clusters that Phalanx configures itself, on machines of a provider: what each command does with them."""

import secrets
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.core.errors import ConfigError, RunError
from phalanx.provision import lifecycle
from phalanx.provision.config import ClusterConfig, NodeRole, build_config
from phalanx.provision.converge import AT_ONCE, JOIN_S, Convergence, Report, make_monitor_command
from phalanx.provision.deep_checks import check_devices
from phalanx.provision.healing import NO_ANSWER, Heal, HealAction
from phalanx.provision.machines import run_on
from phalanx.provision.providers import make_machines
from phalanx.provision.slurm_control import SlurmNodeView
from phalanx.provision.slurm_files import STOP_MONITOR
from phalanx.provision.state import ClusterFolder, ClusterState, ClusterStatus, NodeRecord, NodeStatus, Stage
from phalanx.provision.steps import plan_nodes

STATUS_FILE = "/run/phalanx/health.json"  # of a node's monitor


class SelfManagedCluster:
    """A cluster of provider `local` or `ssh`."""

    def __init__(self, folder: ClusterFolder, report: Report, drain_timeout_s: float, keep_failed: bool = True) -> None:
        self._folder, self._report = folder, report
        self._drain_timeout_s, self._keep_failed = drain_timeout_s, keep_failed

    def create(self, config: ClusterConfig) -> None:
        """Make the cluster, or continue where an earlier call stopped. Raises ConfigError, RunError."""
        with self._folder.hold():
            if self._folder.exists():
                state = self._folder.load()
                if state.config != config:
                    raise ConfigError(
                        f"cluster {config.name} exists and was made from another description; use `phalanx cluster "
                        "scale` or `update`, or delete it first"
                    )
            else:
                state = ClusterState(config)
                problems = make_machines(config, self._folder.path).find_problems(config)
                if problems:
                    shutil.rmtree(self._folder.path)
                    raise ConfigError("; ".join(problems))
                self._copy_scripts(config)
                self._folder.save(state)
            state.status = ClusterStatus.CREATING
            self._work(state).converge()

    def _copy_scripts(self, config: ClusterConfig) -> None:
        """Keep the lifecycle scripts as they are now: each later node gets the same."""
        if config.lifecycle is None:
            return
        scripts = lifecycle.fetch_scripts(config.lifecycle.source)
        if config.lifecycle.on_create not in scripts:
            found = ", ".join(sorted(scripts)[:8]) or "no file"
            raise ConfigError(f"{config.lifecycle.source} has no {config.lifecycle.on_create}; it has {found}")
        shutil.rmtree(self._folder.lifecycle, ignore_errors=True)
        for name, data in scripts.items():
            path = self._folder.lifecycle / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def _work(self, state: ClusterState) -> Convergence:
        machines = make_machines(state.config, self._folder.path)
        return Convergence(self._folder, state, machines, self._report, self._keep_failed)

    # ----------------------------------------------------------------------------------------------------- questions

    def describe(self) -> dict[str, Any]:
        """Status, message and groups, as DescribeCluster answers."""
        state = self._folder.load()
        return describe_state(state)

    def list_nodes(self) -> list[dict[str, str]]:
        """The nodes, with what Slurm and their monitors say of them."""
        state = self._folder.load()
        work = self._work(state)
        controller = state.controller
        views = work.control.query_nodes() if work.machines.is_alive(controller) else {}
        rows = []
        for node in state.nodes:
            alive = node.stage != Stage.ABSENT and work.machines.is_alive(node)
            view = views.get(node.name)
            status = node.status if alive or node.stage == Stage.ABSENT else NodeStatus.NOT_FOUND
            health = ""
            if alive and state.config.group(node.group).role == NodeRole.WORKER:
                command = f'sed -n \'s/.*"verdict": "\\([a-z]*\\)".*/\\1/p\' {STATUS_FILE} 2>/dev/null'
                log = self._folder.log(node.name)
                try:
                    health = run_on(work.machines, node, command, log, check=False).strip()
                except RunError:
                    health = "no answer"
            rows.append(
                {"node": node.name, "group": node.group, "status": str(status), "slurm": view.state if view else "",
                 "health": health, "address": node.address, "instance": node.instance, "host": node.host,
                 "why": (view.reason if view and view.reason else node.reason)}
            )  # fmt: skip
        return rows

    # ------------------------------------------------------------------------------------------------------- changes

    def scale(self, group: str, count: int) -> None:
        """Add nodes to a group, or drain and remove its last ones."""
        with self._folder.hold():
            state = self._folder.load()
            found = state.config.group(group)
            if found.role == NodeRole.CONTROLLER:
                raise ConfigError(f"group {group} is the controller, of which there is one; scale a group of workers")
            tree = state.config.model_dump()
            tree["groups"] = [{**each, "count": count} if each["name"] == group else each for each in tree["groups"]]
            state.config = build_config(tree, [], f"cluster {state.config.name}")
            # Hosts are looked at as they become nodes: those that were taken out need not answer any more.
            new = ClusterConfig.model_validate({**tree, "hosts": ()})
            if problems := make_machines(state.config, self._folder.path).find_problems(new):
                raise ConfigError("; ".join(problems))
            work = self._work(state)
            kept = plan_nodes(state.config, state.nodes)
            surplus = [node.name for node in state.nodes if node not in kept]
            work.drain(surplus, f"removed: group {group} is scaled to {count}", self._drain_timeout_s)
            state.status = ClusterStatus.UPDATING
            work.converge()

    def add_hosts(self, hosts: Sequence[str]) -> None:
        """Add machines of provider ssh. Raises ConfigError for those that do not answer, and for other providers."""
        with self._folder.hold():
            state = self._folder.load()
            tree = state.config.model_dump()
            tree["hosts"] = list(dict.fromkeys([*tree["hosts"], *hosts]))
            state.config = build_config(tree, [], f"cluster {state.config.name}")
            new = ClusterConfig.model_validate({**tree, "hosts": hosts})
            if problems := make_machines(new, self._folder.path).find_problems(new):
                raise ConfigError("; ".join(problems))
            state.bad_hosts = [host for host in state.bad_hosts if host not in hosts]
            self._folder.save(state)

    def check(self, names: Sequence[str]) -> None:
        """Drain nodes, put their devices under load, measure the links between them, and resume those that pass. Raises
        RunError."""
        with self._folder.hold():
            state = self._folder.load()
            work = self._work(state)
            nodes = [state.node(name) for name in dict.fromkeys(names)]
            if others := [node.name for node in nodes if state.config.group(node.group).role != NodeRole.WORKER]:
                raise ConfigError(f"{', '.join(others)} runs no jobs, so it has nothing to check; name workers")
            work.drain([node.name for node in nodes], "deep health check", self._drain_timeout_s)
            failed: dict[str, str] = {}

            def check(node: NodeRecord) -> None:
                self._report(node.name, "deep health check")
                try:
                    check_devices(work.machines, node, self._folder.log(node.name))
                except RunError as error:
                    failed[node.name] = str(error)

            for node in nodes:
                node.status = NodeStatus.DEEP_HEALTH_CHECK
            self._folder.save(state)
            with ThreadPoolExecutor(AT_ONCE if work.machines.OWN_HARDWARE else 1) as pool:
                list(pool.map(check, nodes))
            well = [node for node in nodes if node.name not in failed]
            failed |= work.measure_links(well) if len(well) > 1 else {}
            failed |= work.failures
            for node in nodes:
                node.reason = failed.get(node.name, "")
                node.status = NodeStatus.FAILURE if node.reason else NodeStatus.RUNNING
            self._folder.save(state)
            work.control.wait_usable(
                [node.name for node in nodes if not node.reason],
                JOIN_S,
                lambda name: self._report(name, "passed the deep health check"),
            )
            if failed:
                raise RunError("; ".join(dict.fromkeys(failed.values())))

    def update(self, scripts: str | None, rebuild: bool) -> None:
        """Run new or the same lifecycle scripts on each worker, one after another: drain, run, resume. With `rebuild`
        each node is replaced by a new one."""
        with self._folder.hold():
            state = self._folder.load()
            if scripts is not None:
                tree = state.config.model_dump()
                tree["lifecycle"] = {"on_create": "on_create.sh", **(tree["lifecycle"] or {}), "source": scripts}
                state.config = ClusterConfig.model_validate(tree)
            self._copy_scripts(state.config)
            state.software, state.status = secrets.token_hex(8), ClusterStatus.SYSTEM_UPDATING
            self._folder.save(state)
            work = self._work(state)
            workers = [node for node in state.nodes if state.config.group(node.group).role == NodeRole.WORKER]
            for node in workers:
                work.drain([node.name], "software update", self._drain_timeout_s)
                node.status = NodeStatus.SYSTEM_UPDATING
                if rebuild:
                    work.replace(node, "software update")
                elif node.stage == Stage.JOINED:
                    node.stage, node.config_digest = Stage.CONFIGURED, ""
                work.converge()

    def reboot(self, names: Sequence[str], reason: str = "reboot requested") -> None:
        """Restart nodes at once; their jobs are requeued."""
        with self._folder.hold():
            state = self._folder.load()
            self._refuse_controller(state, names)
            work = self._work(state)
            for name in names:
                work.reboot(state.node(name), reason)
            state.status = ClusterStatus.UPDATING
            work.converge()

    def replace(self, names: Sequence[str], reason: str = "replacement requested") -> None:
        """Replace nodes by new ones at once; their jobs are requeued, or continue on other nodes."""
        with self._folder.hold():
            state = self._folder.load()
            self._refuse_controller(state, names)
            work = self._work(state)
            spares = work.machines.count_spares(state)
            if spares is not None and spares < len(names):
                raise ConfigError(
                    f"{len(names)} nodes cannot be replaced by {spares} spare hosts; name more with --hosts, or reboot "
                    "the nodes"
                )
            for name in names:
                node = state.node(name)
                if node.host:
                    state.bad_hosts.append(node.host)
                work.replace(node, reason)
            state.status = ClusterStatus.UPDATING
            work.converge()

    def reset_gpus(self, names: Sequence[str]) -> None:
        """Reset the GPUs of drained nodes and return them to Slurm; reboot those where that fails."""
        with self._folder.hold():
            state = self._folder.load()
            work = self._work(state)
            for name in names:
                node = state.node(name)
                # The monitor keeps the driver open, and no GPU that is in use can be reset.
                command = f"{STOP_MONITOR}nvidia-smi --gpu-reset >/dev/null 2>&1 && echo reset || echo failed"
                output = run_on(work.machines, node, command, self._folder.log(name), check=False)
                if output.strip().endswith("reset"):
                    run_on(work.machines, node, make_monitor_command(work.machines, name), self._folder.log(name))
                    work.control.resume([name])
                    self._report(name, "GPUs reset")
                else:
                    work.reboot(node, "its GPUs could not be reset")
            work.converge()

    @staticmethod
    def _refuse_controller(state: ClusterState, names: Sequence[str]) -> None:
        """As in HyperPod, only workers and login nodes can be replaced or rebooted."""
        if state.controller.name in [state.node(name).name for name in names]:
            raise ConfigError(f"{state.controller.name} is the controller, whose state would be lost; name other nodes")

    def delete(self) -> None:
        """End all nodes and remove every file of the cluster."""
        with self._folder.hold():
            state = self._folder.load()
            state.status = ClusterStatus.DELETING
            self._folder.save(state)
            machines = make_machines(state.config, self._folder.path)
            for node in state.nodes:
                try:
                    machines.terminate(state, node)
                    self._report(node.name, "removed")
                except RunError as error:
                    self._report(node.name, str(error))
            machines.close(state)
            self._folder.remove()

    # ------------------------------------------------------------------------------------------------------- healing

    def look(self) -> tuple[dict[str, SlurmNodeView], set[str]]:
        """What Slurm says of the workers, and those whose machine does not answer; nothing while a command is at work,
        which reboots or replaces nodes itself."""
        if self._folder.is_held():
            return {}, set()
        state = self._folder.load()
        work = self._work(state)
        joined = {node.name: node for node in state.nodes if node.stage == Stage.JOINED}
        views = {name: view for name, view in work.control.query_nodes().items() if name in joined}
        ask = [name for name, view in views.items() if view.silent or work.machines.LIVENESS_IS_CHEAP]
        return views, {name for name in ask if not work.machines.is_alive(joined[name])}

    def carry_out(self, heal: Heal) -> None:
        """Heal a node. Raises PhalanxError."""
        if heal.reason == NO_ANSWER and heal.node not in self.look()[1]:
            return  # a command has replaced it meanwhile
        if heal.action == HealAction.REPLACE:
            self.replace([heal.node], heal.reason)
        elif heal.action == HealAction.REBOOT:
            self.reboot([heal.node], heal.reason)
        elif heal.action == HealAction.RESET:
            self.reset_gpus([heal.node])
        else:
            self._rejoin(heal.node)

    def _rejoin(self, name: str) -> None:
        with self._folder.hold():
            state = self._folder.load()
            state.node(name).stage = Stage.PROVISIONED
            self._work(state).converge()

    # ------------------------------------------------------------------------------------------------------- for jobs

    def command(self, node: str | None, command: list[str]) -> list[str]:
        """The command line that runs a command on a node; None: on the controller. Raises RunError, ConfigError."""
        state = self._folder.load()
        found = state.controller if node is None else state.node(node)
        machines = make_machines(state.config, self._folder.path)
        if found.stage == Stage.ABSENT or not machines.is_alive(found):
            raise RunError(f"node {found.name} does not run; `phalanx cluster nodes {state.config.name}` says why")
        return machines.command(found, command)


def describe_state(state: ClusterState) -> dict[str, Any]:
    """A cluster in the words of HyperPod's DescribeCluster."""
    running = [node.group for node in state.nodes if node.stage == Stage.JOINED]
    return {
        "ClusterName": state.config.name,
        "ClusterStatus": str(state.status),
        "FailureMessage": state.message,
        "Provider": state.config.provider,
        "NodeRecovery": "Automatic" if state.config.health_policy == "automatic" else "None",
        "InstanceGroups": [
            {"InstanceGroupName": group.name, "Role": str(group.role), "CurrentCount": running.count(group.name),
             "TargetCount": group.count}
            for group in state.config.groups
        ],
    }  # fmt: skip
