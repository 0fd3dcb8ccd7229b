"""Pods of a run's Indexed Job, acted by namespaces: kubectl, controller and kubelet in what matters here.

A pod is a machine of `provision/namespaces.py` with its address and a `/dev/shm` of the manifest's size; its container
has process numbers of its own, with the manifest's command as process 1. Who deletes a pod runs its preStop hook first,
and a replacement pod has another address and an empty `/dev/shm`.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.config import load
from phalanx.core.run_paths import RunPaths
from phalanx.launch import jobs
from phalanx.launch.schedulers.scheduler import LaunchOptions
from phalanx.provision.namespaces import Namespaces
from tests.helpers import ROOT, wait_until

KUBECTL = """#!/bin/sh
case "$*" in
*create*) cat > "$STORE/$(ls "$STORE" | wc -l).yaml" ;;
*get*) echo '{"items": []}' ;;
esac
"""


class Pod:
    """A pod with its container's process."""

    def __init__(self, cluster: "PodCluster", index: int, number: int) -> None:
        self.cluster, self.index, self.name, self.address = cluster, index, f"pod{number}", f"10.77.0.{number + 1}"
        spec = cluster.job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        (memory,) = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
        cluster.machines.start(self.name, self.address)
        size = memory["sizeLimit"].removesuffix("Gi")
        cluster.machines.run(self.name, f"mount -o remount,size={size}g /dev/shm")
        self.hook = container["lifecycle"]["preStop"]["exec"]["command"]
        self.grace_s = spec["terminationGracePeriodSeconds"]
        variables = {"JOB_COMPLETION_INDEX": str(index), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for each in container["env"]:
            variables[each["name"]] = each.get("value", cluster.secret)
        words = ["env", f"--chdir={container['workingDir']}", *(f"{name}={value}" for name, value in variables.items())]
        spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.log = cluster.folder / f"{self.name}.log"
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                cluster.machines.command(self.name, [*spaces, *words, *container["command"]]), stdout=out, stderr=out
            )

    def processes(self) -> dict[int, int]:
        """Numbers in the container of its processes, by those on this machine."""
        found = {}
        for pid in self.cluster.machines.processes(self.name):
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
                if len(numbers) > 2:
                    found[pid] = int(numbers[-1])
        return found

    def first(self) -> int:
        """The container's first process."""
        return next(pid for pid, number in self.processes().items() if number == 1)

    def shared(self) -> list[str]:
        """What is in its `/dev/shm`."""
        first = self.cluster.machines.first_process(self.name)
        return sorted(os.listdir(f"/proc/{first}/root/dev/shm"))

    def wait(self, timeout_s: float = 200) -> int:
        """The container's exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.said()}") from None

    def said(self) -> str:
        return self.log.read_text() + "".join(path.read_text()[-2000:] for path in self.cluster.logs())

    def delete(self) -> int:
        """Delete the pod as kubelet does: its hook, then the end of what is left after the grace period; returns the
        container's exit code."""
        until = time.monotonic() + self.grace_s
        hook = subprocess.Popen(["nsenter", "-t", str(self.first()), "-m", "-p", "--", *self.hook])
        with contextlib.suppress(AssertionError):
            self.wait(max(0.0, until - time.monotonic()))
        hook.kill()
        hook.wait()
        self.cluster.machines.stop(self.name, self.address)
        return self.wait(10)


class PodCluster:
    """A Job's objects as they were given to kubectl, and its pods, the newest last."""

    def __init__(self, folder: Path, machines: Namespaces, objects: list[dict[str, Any]]) -> None:
        self.folder, self.machines = folder, machines
        (self.job,) = [each for each in objects if each["kind"] == "Job"]
        self.secret = next((each["stringData"]["secret"] for each in objects if each["kind"] == "Secret"), "")
        self.pods: list[Pod] = []

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("run/logs/*.log"))

    def create(self, index: int) -> Pod:
        """Create the pod of an index, and have its name lead to it in all pods, as the headless Service does."""
        pod = Pod(self, index, len(self.pods))
        self.pods.append(pod)
        name = self.job["metadata"]["name"]
        newest = {each.index: each.address for each in self.pods}
        lines = "".join(f"{address} {name}-{index}.{name}\\n" for index, address in newest.items())
        for each in self.pods:
            if self.machines.first_process(each.name) is not None:
                self.machines.run(each.name, f"printf '{lines}' > /etc/hosts")
        return pod

    def follows(self, code: int) -> str:
        """What the Job's controller does after the exit code of a pod that was not evicted."""
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"


@contextlib.contextmanager
def launched(
    place: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, *overrides: str, **how: Any
) -> Iterator[PodCluster]:
    """`phalanx launch --on k8s` of `recipe.yaml` in a folder, with run folder `run`; no pod is there yet."""
    store, programs = place / "objects", place / "bin"
    for each in (store, programs):
        each.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STORE", str(store))
    monkeypatch.chdir(place)
    wanted = ["k8s.image=any", f"k8s.volumes=[place:{place}]", f"k8s.python={sys.executable}", *overrides]
    config = load.load_recipe(place / "recipe.yaml", wanted)
    jobs.submit_run("k8s", config, RunPaths(place / "run"), LaunchOptions(nodes, ranks=1, **how), os.environ)
    objects = [each for path in sorted(store.iterdir()) for each in yaml.safe_load_all(path.read_text())]
    machines = Namespaces(place / "machines", f"pods-{place.name}")
    try:
        machines.start_switch()
        yield PodCluster(place, machines, objects)
    finally:
        machines.close()


def until(cluster: PodCluster, what: Any, timeout_s: float = 120) -> None:
    try:
        wait_until(what, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(pod.said() for pod in cluster.pods)) from None
