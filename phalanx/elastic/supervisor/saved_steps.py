"""Which step a job resumes from: the newest one on disk, or a later one in the nodes' memory. Pure functions."""

from phalanx.elastic.supervisor.state import JobState
from phalanx.recovery.catalog import RestorePoint, choose_restore_point, find_missing_ranks


def find_in_memory_step(state: JobState) -> RestorePoint | None:
    """The step in memory to resume from, if it is no older than that on the disk."""
    choice = choose_restore_point({node.node: node.held for node in state.nodes})
    return choice if choice is not None and choice.step > 0 and choice.step >= state.committed else None


def count_replayed_steps(state: JobState, kept: RestorePoint) -> int:
    """Steps after `kept` that all ranks with surviving memory had committed, where a second node lacks some."""
    if state.policy.replicate_every == 1:
        return 0
    own = [
        max(each.steps)
        for node in state.nodes
        for each in node.held
        if (each.generation, each.way) == (kept.generation, kept.way) and each.steps and not each.replica
    ]
    # The next step that a second node gets is none before that has it.
    return max(0, min(min(own, default=0) - kept.step, state.policy.replicate_every - 1))


def describe_lost_state(state: JobState) -> str | None:
    """Why an attempt cannot begin from memory, where something is left there that is newer than the disk."""
    held = {node.node: node.held for node in state.nodes}
    if not any(step > state.committed for files in held.values() for each in files for step in each.steps):
        return None
    where = f"the newest checkpoint, of step {state.committed}" if state.committed else "the start"
    ranks = find_missing_ranks(held)
    if not ranks:
        return f"no step is complete in the nodes' memories, so the run goes back to {where}"
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return (
        f"the state of {which} was lost with its node and no other node holds a complete replica, so the run goes "
        f"back to {where}"
    )


def has_unsaved_step(state: JobState) -> bool:
    """Whether the nodes' memory has a whole step that is newer than the disk."""
    choice = find_in_memory_step(state)
    return choice is not None and choice.step > state.committed
