"""The file of a cluster that `phalanx cluster init` writes."""

import json
from collections.abc import Sequence
from typing import Any

import yaml


def render_file(name: str, provider: str, workers: int, hosts: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The text of a cluster's file, and the description that it means: YAML, or HyperPod's JSON for `sagemaker`, with
    the places to fill in."""
    tree: dict[str, Any] = {
        "name": name,
        "provider": provider,
        "groups": [
            {"name": "controller", "role": "controller", "count": 1},
            {"name": "workers", "role": "worker", "count": workers, "partition": "dev"},
        ],
    }
    if hosts:
        tree["hosts"] = list(hosts)
    if provider != "sagemaker":
        return yaml.safe_dump(tree, sort_keys=False), tree
    scripts = {"SourceS3Uri": "s3://sagemaker-BUCKET/lifecycle", "OnCreate": "on_create.sh"}
    role = "arn:aws:iam::ACCOUNT:role/ROLE"
    request = {
        "ClusterName": name,
        "InstanceGroups": [
            {"InstanceGroupName": group["name"], "InstanceType": kind, "InstanceCount": group["count"],
             "LifeCycleConfig": scripts, "ExecutionRole": role, "ThreadsPerCore": 1}
            for group, kind in zip(tree["groups"], ("ml.m5.xlarge", "ml.p5.48xlarge"), strict=True)
        ],
        "NodeRecovery": "Automatic",
    }  # fmt: skip
    return json.dumps(request, indent=2) + "\n", tree | {"hyperpod": request}
