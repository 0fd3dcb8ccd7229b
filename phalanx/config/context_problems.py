"""What context parallelism (`parallel.context`) cannot be combined with, as sentences; reads no files."""

from phalanx.config.model_spec import is_custom_task, recipe_family
from phalanx.config.schema import Config


def find_context_problems(config: Config) -> list[str]:
    """Invalid keys with parallel.context, and its keys without it."""
    parallel, size = config.parallel, config.parallel.context
    shares = config.balance.context
    if size == 1:
        is_set = {"parallel.context_by": parallel.context_by != "auto", "balance.context": shares != "auto"}
        return [
            f"{key} has no effect with parallel.context 1; remove it, or set parallel.context"
            for key, asked in is_set.items()
            if asked
        ]
    found = []
    if parallel.engine in ("single", "fsdp2"):
        found.append(
            f"parallel.context {size} cannot be combined with parallel.engine {parallel.engine}; set "
            "parallel.engine=sharded"
        )
    if is_custom_task(config) or not recipe_family(config).writes_text or config.model.code is not None:
        kind = (
            "a custom task" if is_custom_task(config) else "model.code" if config.model.code is not None else "a BERT"
        )
        found.append(
            f"parallel.context {size} shares rows of the built-in decoders only, not of {kind}; set parallel.context=1"
        )
    if isinstance(shares, list) and len(shares) != size:
        found.append(
            f"balance.context has {len(shares)} numbers, but parallel.context is {size}; give each rank one, or "
            "set balance.context=auto"
        )
    if config.data.seq_len < 2 * size:
        found.append(
            f"data.seq_len {config.data.seq_len} is too short for parallel.context {size}, which gives each rank two "
            "positions at least; set parallel.context=1"
        )
    if config.train.compile is True and config.memory.activations == "selective":
        found.append(
            f"memory.activations selective recomputes parts of a block, which parallel.context {size} has compiled as "
            "separate ones; set memory.activations=full, or train.compile=false"
        )
    return found
