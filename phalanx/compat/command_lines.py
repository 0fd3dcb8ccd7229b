"""Command lines of Megatron-LLaMA, Megatron-LM and HetSeq as recipes: `phalanx run pretrain_llama.py --...`.

A missing flag has the default of that system. Each flag is either mapped, or skipped with the reason; none is
ignored silently.
"""

from collections.abc import Sequence
from pathlib import Path

from phalanx.compat.command_flags import MappedCommand, read_flags
from phalanx.compat.hetseq_command_line import map_hetseq
from phalanx.compat.megatron.command_line import map_megatron

MEGATRON_SCRIPTS = ("pretrain_llama.py", "pretrain_gpt.py")
HETSEQ_SCRIPTS = ("train.py", "hetseq-train")
HETSEQ_TASKS = ("bert", "mnist", "BertForTokenClassification", "BertForELClassification")


def map_command(script: str, arguments: Sequence[str]) -> MappedCommand | None:
    """The recipe of a command line of one of these systems; None for any other script, and for one of that name whose
    file imports neither. Raises ConfigError for a flag that cannot be read, or that has no counterpart and would change
    what is trained."""
    name, path = Path(script).name, Path(script)
    megatron = name in MEGATRON_SCRIPTS and any(word.startswith("--") for word in arguments)
    flags = read_flags(arguments) if megatron or name in HETSEQ_SCRIPTS else {}
    hetseq = name in HETSEQ_SCRIPTS and (flags.get("task") or [""])[0] in HETSEQ_TASKS
    if not (megatron or hetseq):
        return None
    if path.is_file() and ("megatron" if megatron else "hetseq") not in path.read_text(errors="replace").lower():
        return None
    return map_megatron(flags) if megatron else map_hetseq(flags)
