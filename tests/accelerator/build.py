"""Build the simulated accelerator: `python -m tests.accelerator.build`.

The library is kept in the user's cache folder under a hash of its sources, its compiler's flags and the versions of
torch and Python. Several processes may ask at once: the first builds, the others wait for it.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "torch_sim" / "csrc"
# Compiled at the same time. What is in one unit is read as one file: torch's headers take most of the time.
UNITS = (("device",), ("group", "collectives", "module"))
# -O1 compiles as fast as -O0, whose objects the linker needs longer for, and runs the tests faster.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
TORCH = "2.13."  # the device implements interfaces that torch changes from version to version
ENTRY_POINT = "[torch.backends]\nsim = tests.accelerator.torch_sim:register\n"


def reason_against() -> str | None:
    """Why the library cannot be built here, or None."""
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH):
        return f"the simulated accelerator is written for torch {TORCH}x, and this is {version}"
    if shutil.which("g++") is None:
        return "the simulated accelerator needs g++ to be built (Debian, Ubuntu: apt-get install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return (
            "the simulated accelerator needs Python's headers to be built (Debian, Ubuntu: apt-get install python3-dev)"
        )
    return None


@cache
def folder() -> Path:
    """Where the library is kept; Python processes that have it on their path load the device with torch."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((FLAGS, importlib.metadata.version("torch"), sys.version, ENTRY_POINT)).encode())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "phalanx-tests" / f"torch_sim-{digest.hexdigest()[:16]}"


def library() -> Path:
    """The library, which is built if it is not there yet.

    Raises:
        RuntimeError: it cannot be built; the text is what the compiler says, or what is missing.
    """
    path = folder() / "torch_sim_C.so"
    if path.exists():
        return path
    if reason := reason_against():
        raise RuntimeError(reason)
    folder().parent.mkdir(parents=True, exist_ok=True)
    with open(folder().with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder().parent) as place:
                _build(Path(place))
                _describe(Path(place))
                Path(place).rename(folder())
                Path(place).mkdir()  # for the context to remove
    return path


def _build(place: Path) -> None:
    torch = Path(str(importlib.util.find_spec("torch").origin)).parent  # type: ignore[union-attr]
    headers = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    includes = [part for header in headers for part in ("-isystem", str(header))]
    compilers = []
    for *first, last in UNITS:
        before = [part for name in first for part in ("-include", str(SOURCES / f"{name}.cpp"))]
        unit = ["g++", *FLAGS, *includes, *before, "-c", str(SOURCES / f"{last}.cpp"), "-o", str(place / f"{last}.o")]
        compilers.append(subprocess.Popen(unit, stderr=subprocess.PIPE, text=True))
    errors = [compiler.communicate()[1] for compiler in compilers]
    if any(compiler.returncode for compiler in compilers):
        raise RuntimeError("the simulated accelerator does not compile:\n" + "\n".join(errors))
    objects = [place / f"{last}.o" for *_, last in UNITS]
    libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    linker = ["g++", "-shared", *map(str, objects), "-o", str(place / "torch_sim_C.so"), *libraries]
    linked = subprocess.run(linker, stderr=subprocess.PIPE, text=True)
    if linked.returncode:
        raise RuntimeError(f"the simulated accelerator cannot be linked:\n{linked.stderr}")
    for path in objects:
        path.unlink()


def _describe(place: Path) -> None:
    """What makes torch load the device when it is imported (TORCH_DEVICE_BACKEND_AUTOLOAD)."""
    metadata = place / "torch_sim-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_sim\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)


def main() -> None:
    """Build, and say how long it took. Where it cannot be built, the tests that need it are skipped."""
    if not (folder() / "torch_sim_C.so").exists() and (reason := reason_against()):
        print(f"tests of accelerators will be skipped: {reason}")
        return
    begun = time.monotonic()
    path = library()
    print(f"{path} ({time.monotonic() - begun:.0f} s)")


if __name__ == "__main__":
    main()
