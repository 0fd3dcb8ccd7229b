"""Errors of the user: each class has its exit code, and crosses a process boundary as itself."""

from pathlib import Path

import pytest

from phalanx.core import errors
from phalanx.core.placement import ExitCode
from phalanx.data.tokenizer import default_tokenizer
from phalanx.models.hf_config import read_config
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


def test_a_model_of_the_hub_that_is_not_here_comes_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "hf download org/a-model.v1 --local-dir org/a-model.v1"
    for refused in (lambda: read_config(Path("org/a-model.v1")), lambda: default_tokenizer("org/a-model.v1")):
        with pytest.raises(errors.ConfigError) as raised:
            refused()
        assert str(raised.value).endswith(command)
    assert errors.fetch_hint(tmp_path / "org" / "a-model.v1").endswith(command)  # tokenizers are named by whole paths
    (tmp_path / "runs").mkdir()
    for other in ("model", "/org/model", "a/b/c", "runs/gone", "../org/model", "runs"):
        assert errors.fetch_hint(other) == ""
    (tmp_path / "org" / "first").mkdir(parents=True)
    (tmp_path / "org" / "first" / "config.json").touch()
    assert errors.fetch_hint("org/second") != "" and errors.fetch_hint("org/first") == ""
