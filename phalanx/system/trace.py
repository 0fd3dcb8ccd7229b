"""Names of a step's phases for a profiler; nearly free without a profiler."""

import contextlib

import torch

# In the order of a report. `gather` and `reduce` are collectives: they happen inside the others.
PHASES = ("data", "forward", "backward", "update", "gather", "reduce", "evaluate", "checkpoint")
TRACE_PREFIX = "phalanx."


def phase(name: str) -> contextlib.AbstractContextManager[object]:
    """Mark what runs inside as the phase `name`, one of PHASES, in the trace of `train.profile`."""
    assert name in PHASES, name
    # Without a profiler a mark would still call into the dispatcher, 8 us each time.
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(TRACE_PREFIX + name)
    return contextlib.nullcontext()
