"""What is done with a recipe before torch is imported here: it is made tiny, and its data are looked at."""

import glob
import os

import yaml
from rich.text import Text

from phalanx.config import load
from phalanx.config import shrink as tiny
from phalanx.config.schema import Config
from phalanx.elastic.node import agent
from phalanx.report.terminal import open_terminal
from phalanx.system.fork import fork_call


def check_first_records(wanted: Config) -> None:
    """Raises ConfigError or DataError for mistakes that the first records of the data show."""
    fork_call(_check_first_records, load.to_yaml(wanted), timeout_s=None)


def _check_first_records(text: str) -> None:
    from phalanx.data import quick_check

    quick_check.check_first_records(load.build_config(yaml.safe_load(text), "the recipe"))


def shrink_recipe(wanted: Config, show: bool = True) -> Config:
    """The recipe in tiny; says what it changed."""
    agent.preload(["phalanx.data.chat"])  # with numpy, whose threads would forbid to fork later
    tiny_hf = fork_call(_tiny_hf, load.to_yaml(wanted), timeout_s=None) if wanted.model.from_hf else None
    config = tiny.shrink_config(wanted, _is_source_available, tiny_hf)
    if show:
        terminal = open_terminal()
        terminal.print("shrunk; what differs from the recipe:")
        for line in tiny.list_changes(wanted, config):
            terminal.print(Text(f"  {line}", style="dim"))
    return config


def _is_source_available(source: str) -> bool:
    from phalanx.data.chat import TEMPLATES

    built_in = source in ("stdlib", "stdlib-chat") or source in TEMPLATES
    return built_in or bool(glob.glob(os.path.expanduser(source), recursive=True))


def _tiny_hf(text: str) -> tuple[str, bool]:
    from phalanx.workload import local_copies
    from phalanx.workload.tiny_model import write_tiny_model

    return write_tiny_model(
        local_copies.fetch_local_copies(load.build_config(yaml.safe_load(text), "the recipe"), weights=False)
    )
