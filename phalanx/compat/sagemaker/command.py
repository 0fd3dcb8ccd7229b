"""`python -m phalanx.compat.sagemaker`: the same as `phalanx run`, and what torchrun's -m starts on each rank."""

import sys
from pathlib import Path

from phalanx.compat import run
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.elastic.membership import shared_secret

USAGE = "usage: python -m phalanx.compat.sagemaker [--smp-config FILE] [--nproc N] SCRIPT [ARGUMENTS]"


def main() -> None:
    """Run a script on the ranks that have been started, or on `--nproc` of this machine; ends the process."""
    try:
        script, arguments, config, count = parse(sys.argv[1:])
        sys.exit(
            run.run_script(script, arguments, shared_secret.take_from_environment(), nproc=count, smp_config=config)
        )
    except PhalanxError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


def parse(words: list[str]) -> tuple[str, list[str], Path | None, int | None]:
    """Script, its arguments, configuration and number of ranks. Raises ConfigError for anything else."""
    config: Path | None = None
    count: int | None = None
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if not equals and rest:
            value = rest.pop(0)
        if option == "--smp-config" and value:
            config = Path(value)
        elif option == "--nproc" and value.isdecimal() and int(value) > 0:
            count = int(value)
        else:
            raise ConfigError(f"{option} {value} is not a valid option; {USAGE}")
    if not rest:
        raise ConfigError(f"no script was given; {USAGE}")
    return rest[0], rest[1:], config, count
