"""The knobs of what happens when something breaks. None of them defines the loss curve of a run that is well."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from phalanx.config.fields import Count, CountOrZero, Positive, Section, accept_off, knob, reject_bool


class ResilienceSection(Section):
    """What happens when something breaks."""

    in_memory_checkpoints: bool | Literal["auto"] = knob(
        "auto",
        "keep the last two steps in shared memory, where they outlive the ranks: after a failure the run goes on from "
        "the last step; auto: where there is room, and on accelerators every Nth where each would cost more than half "
        "a percent of it",
    )
    replicate_every: Annotated[
        Annotated[int, Field(ge=2, le=10**9)] | Literal["auto", "every_step", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "several nodes: every_step: each step is kept in the shared memory of a second node too, so that none is lost "
        "with a node; a number: every so many steps, and a lost node takes the run back to the last of these; auto: "
        "every_step where there is room; off: a lost node takes the run back to a checkpoint",
    )
    max_restarts: CountOrZero = knob(3, "restarts after failures without a step done in between, before giving up")
    max_identical_failures: Count = knob(3, "times that ranks may fail in the same step at the same line of code")
    on_lost_node: list[Literal["replace", "shrink", "wait"]] = knob(
        ["replace", "shrink", "wait"],
        "what is tried in turn when a node is lost; replace: a spare takes its ranks, shrink: the others divide them, "
        "wait: it may come back; nothing in the list: the run ends",
    )
    wait_for_node_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        600.0, "seconds for which wait in on_lost_node waits"
    )
    rejoin_nodes: bool = knob(True, "a run that goes on with fewer nodes takes one back in as soon as it returns")
    heartbeat_timeout_s: Annotated[float, Field(ge=0.5, le=3600), BeforeValidator(reject_bool)] = knob(
        1.0,
        "several nodes: seconds of silence after which a node is lost; agents say ten times a second that they live",
    )
    hang_timeout_s: Annotated[
        Annotated[float, Field(gt=0, le=604800)] | Literal["auto", "off"], BeforeValidator(accept_off)
    ] = knob(
        "auto",
        "seconds without any change in a step after which a rank counts as hung, and all are started again; auto: "
        "ten times the longest of the last steps, and 20 at least; off: nobody looks",
    )
    on_nan: Literal["skip", "stop", "rollback"] = knob(
        "skip",
        "a gradient that is not finite; skip: the step is not taken, and 20 in a row end the run; stop: the first one "
        "does; rollback: back to a checkpoint, and past the data",
    )
    on_spike: Annotated[Literal["off", "skip", "stop", "rollback"], BeforeValidator(accept_off)] = knob(
        "off", "a loss far above those of the steps before; off: nobody looks; else as on_nan"
    )
    spike_factor: Positive = knob(
        10.0, "what is far: so many spreads (by the median deviation) above the median of the last 64 steps"
    )
    rollback_steps: Count = knob(10, "with rollback: so many steps up to the bad one have their data passed over")
    checksum_every: CountOrZero = knob(
        0, "steps after which parameters are compared between ranks that must hold the same; 0: never"
    )
    storage_timeout_s: Annotated[float, Field(gt=0, le=604800), BeforeValidator(reject_bool)] = knob(
        300.0, "seconds for which an operation of a remote store that fails or stalls is tried again"
    )
    health: Annotated[Literal["quick", "off"], BeforeValidator(accept_off)] = knob(
        "quick",
        "quick: each node is looked at before it is trained on, and again after a death; one that is not fit stops the "
        "start. off: none is",
    )
