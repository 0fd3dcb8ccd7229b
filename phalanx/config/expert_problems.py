"""What expert parallelism (`parallel.expert`) cannot be combined with, as sentences; reads no files."""

from phalanx.config import optimizers
from phalanx.config.schema import Config
from phalanx.layout.model_shape import ModelSpec


def find_expert_problems(config: Config) -> list[str]:
    """Invalid keys with parallel.expert, and its keys without it."""
    parallel, size, shares = config.parallel, config.parallel.expert, config.balance.experts
    if size == 1:
        if shares == "auto":
            return []
        return ["balance.experts has no effect with parallel.expert 1; remove it, or set parallel.expert"]
    rule = optimizers.OPTIMIZERS.get(config.optim.name)
    row = rule is not None and rule.granularity == "row"
    instead = {
        f"parallel.engine {parallel.engine}": (parallel.engine in ("single", "fsdp2"), "parallel.engine=sharded"),
        f"parallel.shard_degree {parallel.shard_degree}": (
            parallel.shard_degree != "auto",
            "parallel.shard_degree=auto",
        ),
        "parallel.schedule zero_bubble": (parallel.schedule == "zero_bubble", "parallel.schedule=1f1b"),
        f"parallel.tensor {parallel.tensor}": (parallel.tensor > 1, "parallel.tensor=1"),
        "train.compile true with memory.activations selective": (
            config.train.compile is True and config.memory.activations == "selective",
            "memory.activations=full",
        ),
        f"comm.compress {config.comm.compress}": (config.comm.compress != "none", "comm.compress=none"),
        f"optim.name {config.optim.name}, which updates whole rows of a matrix,": (row, "optim.name=adamw"),
        f"resilience.checksum_every {config.resilience.checksum_every}, which compares what all ranks hold,": (
            config.resilience.checksum_every > 0,
            "resilience.checksum_every=0",
        ),
    }
    found = [
        f"{what} cannot be combined with parallel.expert {size}; set {remedy}, or parallel.expert=1"
        for what, (is_set, remedy) in instead.items()
        if is_set
    ]
    if config.task.kind == "custom" or config.task.code is not None:
        found.append(
            f"parallel.expert {size} divides the experts of built-in models only, not of a custom task; set "
            "parallel.expert=1"
        )
    if isinstance(shares, list) and len(shares) != size:
        found.append(
            f"balance.experts has {len(shares)} numbers, but parallel.expert is {size}; give each rank one, or "
            "set balance.experts=auto"
        )
    return found


def find_expert_shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Problems of parallel.expert with the shapes of a model."""
    size = config.parallel.expert
    if size == 1:
        return []
    if spec.moe is None:
        return [f"parallel.expert {size} divides experts, and the model has none; set parallel.expert=1"]
    if size > spec.moe.experts:
        return [f"parallel.expert {size} is more than the model's {spec.moe.experts} experts; lower it"]
    return []
