"""Errors of the user: each class has its exit code, and crosses a process boundary as itself."""

import pytest

from phalanx.core import errors
from phalanx.core.placement import ExitCode
from phalanx.system.fork import error_of

CODES = {
    errors.PhalanxError: ExitCode.FAILED,
    errors.ConfigError: ExitCode.CONFIG,
    errors.DataError: ExitCode.CONFIG,
    errors.CheckpointError: ExitCode.FAILED,
    errors.RunError: ExitCode.CONFIG,
    errors.CutOff: ExitCode.FAILED,
    errors.Unhealthy: ExitCode.UNHEALTHY,
    errors.Diverged: ExitCode.CONFIG,
    errors.Corrupted: ExitCode.FAILED,
    errors.DamagedState: ExitCode.FAILED,
    errors.CollectiveError: ExitCode.FAILED,
    errors.StorageError: ExitCode.FAILED,
    errors.OutOfMemory: ExitCode.OUT_OF_MEMORY,
}


def test_every_error_has_the_exit_code_that_says_whether_to_try_again() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(CODES)
    assert {cls: cls.exit_code for cls in CODES} == CODES


@pytest.mark.parametrize("cls", CODES, ids=lambda cls: cls.__name__)
def test_an_error_of_a_child_process_is_raised_as_it_was(cls: type[errors.PhalanxError]) -> None:
    record = {"type": cls.__name__, "message": "a sentence", "exit_code": int(cls.exit_code)}
    raised = error_of(record)
    assert type(raised) is cls
    assert str(raised) == "a sentence"


def test_exit_codes_do_not_collide_with_those_of_the_shell() -> None:
    values = [int(code) for code in ExitCode]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 126 for value in values)
