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


def look_at_data(wanted: Config) -> None:
    """Raises ConfigError or DataError for mistakes that the first records of the data show."""
    fork_call(_look_at_data, load.to_yaml(wanted), timeout_s=None)


def _look_at_data(text: str) -> None:
    from phalanx.data import quick_check

    quick_check.check(load.check(yaml.safe_load(text), "the recipe"))


def shrink(wanted: Config, show: bool = True) -> Config:
    """The recipe in tiny; says what it changed."""
    agent.preload(["phalanx.data.chat"])  # with numpy, whose threads would forbid to fork later
    tiny_hf = fork_call(_tiny_hf, load.to_yaml(wanted), timeout_s=None) if wanted.model.from_hf else None
    config = tiny.shrunk(wanted, _is_here, tiny_hf)
    if show:
        terminal = open_terminal()
        terminal.print("shrunk; what differs from the recipe:")
        for line in tiny.changes(wanted, config):
            terminal.print(Text(f"  {line}", style="dim"))
    return config


def _is_here(source: str) -> bool:
    from phalanx.data.chat import TEMPLATES

    built_in = source in ("stdlib", "stdlib-chat") or source in TEMPLATES
    return built_in or bool(glob.glob(os.path.expanduser(source), recursive=True))


def _tiny_hf(text: str) -> tuple[str, bool]:
    from phalanx.workload import local_copies
    from phalanx.workload.tiny_model import tiny_folder

    return tiny_folder(local_copies.fetched(load.check(yaml.safe_load(text), "the recipe"), weights=False))
