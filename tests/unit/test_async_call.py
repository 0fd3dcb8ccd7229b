"""Function calls that an agent does not wait for."""

import time

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.core.placement import Placement
from phalanx.system import fork
from phalanx.system.async_call import AsyncCall
from tests.helpers import run_ranks


def held_in_the_kernel(placement: Placement, waits: bool) -> list[float | str]:
    """How long it takes to learn that a call has not ended in time whose process no signal ends, and the words; of one
    that is waited for, too."""
    vars(fork)["kill_group"] = lambda pid: None  # as if no signal reached it
    began = time.monotonic()
    try:
        if waits:
            fork.fork_call(time.sleep, 60, timeout_s=0.1)
        errand = AsyncCall(time.sleep, 60, timeout_s=0.1)
        time.sleep(0.2)
        began = time.monotonic()
        errand.result()
    except PhalanxError as error:
        return [time.monotonic() - began, str(error)]
    return []


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_a_file_system_holds_in_the_kernel_is_not_waited_for(waits: bool) -> None:
    took_s, words = run_ranks(held_in_the_kernel, 1, waits=waits)[0]
    late = "sleep was stopped: it had not finished after 0.1 s in its own process"
    assert words == (late if waits else "sleep had not finished after 0.1 s")
    assert took_s < 30
