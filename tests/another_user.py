"""What another user of the machine can do: a function in a process with nobody's rights. Only root can be one."""

import encodings.idna  # noqa: F401  # as another user a process may find no modules any more
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that every user can read: pytest's own lie in one that its user alone can enter."""
    with tempfile.TemporaryDirectory(prefix="phalanx-open-") as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


def begin(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Begin a function as another user. What is returned waits for its end and gives what it returned (JSON-able), or
    the name and text of what it raised."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:  # nothing may leave this block: the child would go on as a second pytest
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                said = json.dumps(function(*arguments))
            except BaseException as error:
                said = json.dumps(f"{type(error).__name__}: {error}")
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)

    def end() -> Any:
        with open(reader) as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(said)

    return end
