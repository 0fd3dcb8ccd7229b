"""Function calls that an agent does not wait for."""

import time

from phalanx.cluster import fork
from phalanx.cluster.errand import Errand
from phalanx.errors import PhalanxError
from phalanx.records import Placement
from tests.helpers import run_ranks


def held_in_the_kernel(placement: Placement) -> list[float | str]:
    """How long it takes to learn that a call has not ended in time whose process no signal ends, and the words."""
    vars(fork)["kill_group"] = lambda pid: None  # as if no signal reached it
    errand = Errand(time.sleep, 60, timeout_s=0.1)
    time.sleep(0.2)
    began = time.monotonic()
    try:
        errand.result()
    except PhalanxError as error:
        return [time.monotonic() - began, str(error)]
    return []


def test_one_that_a_file_system_holds_in_the_kernel_is_not_waited_for() -> None:
    took_s, words = run_ranks(held_in_the_kernel, 1)[0]
    assert words == "sleep had not finished after 0.1 s"
    assert took_s < 30
