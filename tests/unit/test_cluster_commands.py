"""The command line of clusters, as far as it needs no machines."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.cluster import cluster_app
from phalanx.core.errors import ConfigError, RunError
from phalanx.provision.cluster_file import read_cluster_file
from phalanx.provision.config import ClusterConfig
from phalanx.provision.converge import Convergence
from phalanx.provision.ssh import SshMachines
from phalanx.provision.state import ClusterFolder, ClusterState, NodeRecord
from phalanx.provision.steps import plan_nodes


def call(*words: Any) -> Any:
    return CliRunner().invoke(cluster_app, [str(word) for word in words])


def test_init_writes_a_file_that_create_reads(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    assert call("init", file, "--name", "my", "--provider", "ssh", "--workers", 2, "--hosts", "a,b,c").exit_code == 0
    config, _ = read_cluster_file(file)
    assert (config.name, config.provider, config.hosts, config.group("workers").count) == (
        "my",
        "ssh",
        ("a", "b", "c"),
        2,
    )
    again = call("init", file, "--name", "my", "--provider", "local", "--workers", 2)
    assert isinstance(again.exception, ConfigError) and "exists" in str(again.exception)
    wrong = call("init", tmp_path / "x.yaml", "--name", "my", "--provider", "sagemaker", "--workers", 2)
    assert isinstance(wrong.exception, ConfigError) and "HyperPod's JSON" in str(wrong.exception)
    asked = CliRunner().invoke(cluster_app, ["init", str(tmp_path / "y.yaml")], input="mine\nlocal\n3\n")
    assert asked.exit_code == 0 and read_cluster_file(tmp_path / "y.yaml")[0].group("workers").count == 3


def test_clusters_are_listed_and_unknown_ones_are_sentences(tmp_path: Path) -> None:
    assert "no clusters" in call("list", "--folder", tmp_path).output
    for words in (("describe", "my"), ("nodes", "my"), ("scale", "my", "workers", 2), ("delete", "my"), ("heal", "my")):
        found = call(*words, "--folder", tmp_path)
        assert isinstance(found.exception, ConfigError) and "no cluster my in" in str(found.exception), words
    found = call("describe", "../my", "--folder", tmp_path)
    assert isinstance(found.exception, ConfigError) and "is not a name of a cluster" in str(found.exception)
    folder = ClusterFolder(tmp_path, "my")
    folder.path.mkdir()
    folder.save(ClusterState(make_config()))
    assert "my" in call("list", "--folder", tmp_path).output
    assert "Creating (provider local" in call("describe", "my", "--folder", tmp_path).output


def test_two_commands_at_a_time_are_refused(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "my")
    assert not folder.is_held()
    with folder.hold():
        folder.save(ClusterState(make_config()))
        assert folder.is_held()
        with pytest.raises(RunError, match="is at work on cluster my; wait for it, or end it"), folder.hold():
            raise AssertionError
    assert not folder.is_held()


def test_a_host_that_cannot_be_cleaned_is_named_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config, node = make_config(), NodeRecord("w-1", "w", host="h", address="10.0.0.1")
    machines = SshMachines(config, tmp_path)
    with pytest.raises(RunError, match="host h does not answer, so it keeps the cluster's files"):
        machines.terminate(ClusterState(config), node)
    assert node.host == node.address == ""
    machines.terminate(ClusterState(config), node)


def test_a_cluster_scales_though_a_host_that_was_taken_out_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    groups = [{"name": "head", "role": "controller"}, {"name": "w", "count": 2}]
    config = ClusterConfig.model_validate({"name": "my", "provider": "ssh", "hosts": list("abcd"), "groups": groups})
    folder = ClusterFolder(tmp_path, "my")
    folder.path.mkdir()
    folder.save(ClusterState(config, nodes=plan_nodes(config, ()), bad_hosts=["d"]))
    seen: list[int] = []
    monkeypatch.setattr(Convergence, "converge", lambda self: seen.append(self.state.config.group("w").count))
    assert call("scale", "my", "w", 1, "--folder", tmp_path).exit_code == 0 and seen == [1]


def test_a_state_of_a_later_release_is_refused(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "my")
    folder.path.mkdir()
    folder.save(ClusterState(make_config()))
    file = folder.path / "cluster.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(RunError, match="which a later release of Phalanx has written"):
        folder.load()


def make_config() -> ClusterConfig:
    tree = {"name": "my", "groups": [{"name": "head", "role": "controller"}, {"name": "workers", "count": 2}]}
    return ClusterConfig.model_validate(tree)
