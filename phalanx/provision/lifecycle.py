"""Lifecycle scripts in HyperPod's format: the folder that each new node gets, the two JSON files that its scripts read,
and why a script failed.

`on_create.sh` runs as root in its folder, with `provisioning_parameters.json` beside it and the path of
`resource_config.json` in SAGEMAKER_RESOURCE_CONFIG_PATH. Scripts that call `sudo` find one where none is installed.
Of bash scripts that end at the first failure (`set -e`), the line where they did is named.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.provision.config import ClusterConfig, NodeRole
from phalanx.storage import files as storage

PARAMETERS = "provisioning_parameters.json"
FOLDER = "/opt/phalanx/lifecycle"  # on a node
RESOURCES = "/opt/ml/config/resource_config.json"
DONE = "/var/lib/phalanx/lifecycle-done"  # holds the digest of the scripts that have run to their end
MOST_BYTES = 64 << 20  # of all scripts
LAST_LINES = 12  # of the output of a failed script that are shown
TOOLS = "/opt/phalanx/bin"  # first in the PATH of scripts
# Scripts run as root already, where sudo need not be installed, and would drop BASH_ENV.
_SUDO = """#!/bin/sh
case "$1" in -*) [ ! -x /usr/bin/sudo ] || exec /usr/bin/sudo "$@" ;; esac
user=
while :; do
  case "$1" in
    -u) user=$2; shift 2 ;;
    --) shift; break ;;
    -*) shift ;;
    *) break ;;
  esac
done
[ -z "$user" ] || exec runuser -u "$user" -- env "$@"
exec env "$@"
"""
_FAILED = "/run/phalanx/lifecycle-failed"
# Each bash reads this first, as BASH_ENV, and notes when and at which line of which file it ends.
_TRAP = f"""set -E
trap '{{ case $- in *e*) echo $EPOCHSECONDS "${{BASH_SOURCE[0]}}:$LINENO" >>{_FAILED} ;; esac; }} 2>/dev/null' ERR
"""
TOOL_FILES = {f"{TOOLS}/sudo": _SUDO, f"{TOOLS}/trap.sh": _TRAP}
_ENDED, _AT = "phalanx: the lifecycle script ended with code", "phalanx: it failed at"
CHAIN_S = 2  # at most, from the end of a script to that of the script that called it
# What only AWS has: its command line, its machines' metadata service, their image, its file systems and network cards.
_AWS = re.compile(
    r"(?:^|[\s;&|(`\"'])(?:aws|ec2-metadata|nvidia-efa|amazon-linux-extras|mount\.lustre|lctl)\s|169\.254\.169\.254|"
    r"amazonaws\.com|/opt/aws|/opt/slurm/etc|-t\s+lustre|[\s\"'=]/fsx\b|\bimds\b|boto3",
    re.IGNORECASE,
)


def fetch_scripts(source: str) -> dict[str, bytes]:
    """All files of a folder of scripts, local or at a URL, by their path in it. Raises ConfigError."""
    if storage.is_url(source):
        found = {
            entry.url.removeprefix(source.rstrip("/")).lstrip("/"): storage.read_bytes(entry.url)
            for entry in storage.list_folder(source, recursive=True)
            if not entry.folder
        }
    else:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"the folder of lifecycle scripts {source} does not exist; correct the path")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".git" not in path.parts]
        found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    if outside := [name for name in found if ".." in Path(name).parts or name.startswith("/")]:
        raise ConfigError(f"{source} has {outside[0]!r}, which would be written outside of its folder; remove it")
    if (size := sum(map(len, found.values()))) > MOST_BYTES:
        raise ConfigError(f"{source} has {size >> 20} MiB of files, too many for scripts; name their own folder")
    return found


def read_parameters(scripts: Mapping[str, bytes]) -> dict[str, Any]:
    """Read provisioning_parameters.json of the scripts; empty if there is none. Raises ConfigError."""
    if PARAMETERS not in scripts:
        return {}
    try:
        tree = json.loads(scripts[PARAMETERS])
        assert isinstance(tree, dict) and all(isinstance(each, dict) for each in tree.get("worker_groups", []))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"{PARAMETERS} is not an object of HyperPod's format ({error}); correct it") from None
    return tree


def make_parameters(config: ClusterConfig) -> dict[str, Any]:
    """Make provisioning_parameters.json of a cluster: the given one, with the actual groups."""
    login = next((group.name for group in config.groups if group.role == NodeRole.LOGIN), None)
    workers = [group for group in config.groups if group.role == NodeRole.WORKER]
    made: dict[str, Any] = {"version": "1.0.0", "workload_manager": "slurm", "controller_group": config.controller.name}
    made |= {} if login is None else {"login_group": login}
    made["worker_groups"] = [
        {"instance_group_name": group.name, "partition_name": group.partition or "dev"} for group in workers
    ]
    return made | config.provisioning_parameters


def make_resources(config: ClusterConfig, nodes: Iterable[Any]) -> dict[str, Any]:
    """resource_config.json: the nodes of each group, with name, instance and address."""
    by_group: dict[str, list[dict[str, str]]] = {group.name: [] for group in config.groups}
    for node in nodes:
        by_group[node.group].append(
            {"InstanceName": node.name, "AgentIpAddress": node.address, "CustomerIpAddress": node.address,
             "InstanceId": node.instance}
        )  # fmt: skip
    return {
        "ClusterConfig": {"ClusterName": config.name},
        "InstanceGroups": [{"Name": name, "Instances": instances} for name, instances in by_group.items()],
    }


def make_run_script(on_create: str, digest: str) -> str:
    """A shell script that runs the lifecycle script once on its node, and prints its exit code for `read_exit_code`: a
    second caller waits for the first."""
    return f"""
mkdir -p /var/lib/phalanx /run/phalanx
exec 9>/run/phalanx/lifecycle.lock
flock 9
if [ "$(cat {DONE} 2>/dev/null)" = {digest} ]; then echo '{_ENDED}' 0; exit; fi
cd {FOLDER}
export SAGEMAKER_RESOURCE_CONFIG_PATH={RESOURCES} SLURM_CONF=/etc/slurm/slurm.conf PATH={TOOLS}:$PATH
rm -f {_FAILED}
BASH_ENV={TOOLS}/trap.sh bash {shlex.quote(on_create)} </dev/null 9>&-
code=$?
[ $code = 0 ] && echo {digest} >{DONE}
[ ! -f {_FAILED} ] || sed 's/^/\\n{_AT} /' {_FAILED}
printf '\\n{_ENDED} %s\\n' $code
"""


def read_exit_code(output: str) -> tuple[int, str, list[str]]:
    """The exit code of a lifecycle script, its output, and where it failed, as FILE:LINE, the innermost script first.
    What the script has left running may write later than the code."""
    ended = re.search(rf"^{re.escape(_ENDED)} (\d+)$", output, re.MULTILINE)
    failed = re.findall(rf"^{re.escape(_AT)} (\d+) (.+)$", output, re.MULTILINE)
    rest = re.sub(rf"^(?:{re.escape(_ENDED)}|{re.escape(_AT)}) .*\n?", "", output, flags=re.MULTILINE)
    last = int(failed[-1][0]) if failed else 0
    places: list[str] = []
    for second, place in reversed(failed):  # a script ends at once after one that it called
        if last - int(second) > CHAIN_S:
            break
        last, places = int(second), [place.removeprefix(f"{FOLDER}/").removeprefix("./"), *places]
    return (255 if ended is None else int(ended[1])), rest, list(dict.fromkeys(places))


def explain_failure(output: str, scripts: Mapping[str, bytes], places: Sequence[str] = ()) -> str:
    """Why a lifecycle script failed: the end of its output, the line where it stopped, and what of it needs AWS."""
    lines = [line for line in output.splitlines() if line.strip()][-LAST_LINES:]
    said = "\n".join(f"    {line[:200]}" for line in lines) or "    (no output)"
    name, _, number = places[0].rpartition(":") if places else ("", "", "")
    text = scripts.get(name, b"").decode(errors="replace").splitlines()
    if text and number.isdecimal() and 0 < int(number) <= len(text):
        stopped = text[int(number) - 1]
        needs = ", which needs AWS" if _AWS.search(f" {stopped} ") else ""
        said += f"\n  it stopped at {places[0]} `{stopped.strip()[:120]}`{needs}"
        if needs:
            return said
    # A script that the output names, as a failed call of it does; else the one that has stopped.
    blamed = [called for line in reversed(lines) for called in scripts if called.endswith(".sh") and called in line]
    for called in [*blamed, name]:
        if needs_aws := find_aws_lines({called: scripts.get(called, b"")}):
            more = f", and {len(needs_aws) - 1} lines more" if needs_aws[1:] else ""
            return f"{said}\n  AWS, or the image of its machines, is needed by {needs_aws[0]}{more}"
    return said


def find_aws_lines(scripts: Mapping[str, bytes]) -> list[str]:
    """Lines of scripts that need AWS, as FILE:LINE `text`."""
    found = []
    for name, data in scripts.items():
        if name.endswith((".sh", ".py")):
            for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
                if _AWS.search(f" {line} ") and not line.lstrip().startswith("#"):
                    found.append(f"{name}:{number} `{line.strip()[:120]}`")
    return found
