"""Reads the file that describes a cluster: YAML, or HyperPod's create-cluster JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.config.load import parse_yaml
from phalanx.core.errors import ConfigError
from phalanx.provision import hyperpod
from phalanx.provision.config import ClusterConfig, build_config


def read_cluster_file(
    path: Path, provider: str | None = None, hosts: Sequence[str] = (), scripts: str | None = None
) -> tuple[ClusterConfig, list[str]]:
    """Read a cluster from YAML or HyperPod's JSON; also returns sentences on ignored fields. `provider`, `hosts`
    and `scripts` (a folder of lifecycle scripts) replace those of the file. Raises ConfigError with all problems.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster file {path} ({error}); `phalanx cluster init` writes one") from None
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        tree, problems = hyperpod.parse_json(text, str(path))
        return hyperpod.build_config(tree, problems, str(path), provider, hosts, scripts)
    tree = parse_yaml(text, str(path))
    replaced: dict[str, Any] = {"provider": provider, "hosts": list(hosts) or None}
    tree |= {key: value for key, value in replaced.items() if value is not None}
    if scripts is not None:
        tree["lifecycle"] = {**(tree.get("lifecycle") or {}), "source": scripts}
    return build_config(tree, [], str(path)), []
