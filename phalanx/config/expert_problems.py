"""What expert parallelism (`parallel.expert`) cannot be combined with, as sentences; reads no files."""

from phalanx.config.schema import Config
from phalanx.layout.model_shape import ModelSpec


def find_expert_problems(config: Config) -> list[str]:
    """Invalid keys with parallel.expert, and its keys without it."""
    parallel, size, shares = config.parallel, config.parallel.expert, config.balance.experts
    if parallel.axes.expert_ranks == 1 and shares != "auto":
        return ["balance.experts has no effect with parallel.expert 1; remove it, or set parallel.expert"]
    found = []
    if isinstance(shares, list) and len(shares) != (ranks := parallel.axes.expert_ranks):
        over = f"parallel.expert is {size}"
        over += f" and parallel.tensor {parallel.tensor}, together {ranks} ranks" if parallel.tensor > 1 else ""
        found.append(
            f"balance.experts has {len(shares)} numbers, but {over}; give each rank one, or set balance.experts=auto"
        )
    if size == 1:
        return found
    instead = {
        f"parallel.engine {parallel.engine}": (parallel.engine in ("single", "fsdp2"), "parallel.engine=sharded"),
        f"parallel.shard_degree {parallel.shard_degree}": (
            parallel.shard_degree != "auto",
            "parallel.shard_degree=auto",
        ),
        "parallel.schedule zero_bubble": (parallel.schedule == "zero_bubble", "parallel.schedule=1f1b"),
        "train.compile true with memory.activations selective": (
            config.train.compile is True and config.memory.activations == "selective",
            "memory.activations=full",
        ),
        f"comm.compress {config.comm.compress}": (config.comm.compress != "none", "comm.compress=none"),
        f"resilience.checksum_every {config.resilience.checksum_every}, which compares what all ranks hold,": (
            config.resilience.checksum_every > 0,
            "resilience.checksum_every=0",
        ),
    }
    found += [
        f"{what} cannot be combined with parallel.expert {size}; set {remedy}, or parallel.expert=1"
        for what, (is_set, remedy) in instead.items()
        if is_set
    ]
    if config.task.kind == "custom" or config.task.code is not None:
        found.append(
            f"parallel.expert {size} divides the experts of built-in models only, not of a custom task; set "
            "parallel.expert=1"
        )
    return found


def find_expert_shape_problems(config: Config, spec: ModelSpec) -> list[str]:
    """Problems of parallel.expert, and of parallel.tensor with experts, with the shapes of a model."""
    size, tensor, train = config.parallel.expert, config.parallel.tensor, config.train
    if spec.moe is None and size > 1:
        return [f"parallel.expert {size} divides experts, and the model has none; set parallel.expert=1"]
    if spec.moe is None:
        unread = config.balance.experts != "auto" and tensor > 1
        return ["balance.experts has no effect on a model without experts; remove it"] if unread else []
    found = []
    if size * tensor > spec.moe.experts:
        what = f"parallel.expert {size} is" if tensor == 1 else f"parallel.expert {size} x parallel.tensor {tensor} are"
        found.append(f"{what} more than the model's {spec.moe.experts} experts; lower it")
    if tensor == 1:
        return found
    of_experts = f"experts that parallel.tensor {tensor} divides"
    if train.fp8 != "none":
        found.append(f"train.fp8 {train.fp8} does not multiply {of_experts}; set parallel.tensor=1, or train.fp8=none")
    if size == 1 and train.compile is True and config.memory.activations == "selective":
        found.append(
            f"train.compile true with memory.activations selective cannot be combined with {of_experts}; set "
            "memory.activations=full"
        )
    return found
