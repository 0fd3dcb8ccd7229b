"""Files that one process at a time holds for as long as it lives, while others may look whether somebody does."""

import contextlib
import fcntl
import time

PASSING_S = 1.0  # what those get who hold one for a moment, only to look
AGAIN_S = 0.01


def take(descriptor: int) -> bool:
    """Lock an open file for this process alone, until it is closed; False where another process holds it. Who just
    looks (`is_held`) is waited for."""
    until = time.monotonic() + PASSING_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if is_held(descriptor) or time.monotonic() > until:
            return False
        time.sleep(AGAIN_S)


def is_held(descriptor: int) -> bool:
    """Whether another process holds an open file for itself."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
