"""One call of another program, such as those of Slurm and Kubernetes, whose words become an error's."""

import re
import subprocess
from collections.abc import Mapping, Sequence

from phalanx.core.errors import ConfigError, RunError

MOST_CHARACTERS = 300  # of what a program says


def run_program(
    command: Sequence[str],
    title: str,
    timeout_s: float,
    missing: str,
    again: str = "try again",
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a program, with `given` as its input, in an `environment` (None: this process's), and return its output.

    Raises ConfigError with the sentence `missing` where it is not there; RunError, about `title`, where it cannot be
    run, fails, with its own words, or does not answer in time, with what to do: `again`.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=timeout_s, errors="replace", env=environment
        )
    except FileNotFoundError:
        raise ConfigError(missing) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{title} did not answer within {timeout_s:g} s; {again}") from None
    except OSError as error:
        raise RunError(f"{title} cannot be run ({error.strerror}); fix its installation") from None
    if done.returncode:
        raise RunError(f"{title} failed: {clean_output(done.stderr or done.stdout, done.returncode)}")
    return done.stdout


def clean_output(text: str, code: int) -> str:
    """What a program that failed with `code` has said, on one line, without prefixes such as `sinfo: error:`."""
    lines = [re.sub(r"^(\w+: )?(error|fatal): ", "", line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:MOST_CHARACTERS] or f"exit code {code} and no output"
