"""What a process that was killed while it compiled has left does not stop those that come after it; nor does code run
that another user has put in its place."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from phalanx.parallel import parallelize
from phalanx.parallel.parallelize import compile_units, find_compile_problem
from phalanx.storage.local_copies import lock_file
from tests.helpers import run_ranks


def torch_calls_them(placement: Placement, cache: str) -> list[str]:
    """How torch names a library, the folder it keeps while it builds one, and where its locks are."""
    from torch._inductor.codecache import get_lock_dir
    from torch._inductor.cpp_builder import _BUILD_TEMP_DIR, CppBuilder, CppOptions

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    builder = CppBuilder("key.main", [f"{cache}/ab/key.main.cpp"], CppOptions(), f"{cache}/ab")
    return [builder.get_target_file_path(), f"{builder._output_dir}/{builder._name}_{_BUILD_TEMP_DIR}", get_lock_dir()]


def test_a_library_that_a_killed_linker_left_is_removed(tmp_path: Path) -> None:
    library, building, locks = (Path(name) for name in run_ranks(torch_calls_them, 1, cache=str(tmp_path))[0])
    assert locks == tmp_path / "locks"
    building.mkdir(parents=True)
    library.touch()
    whole = library.with_name("another.main.so")
    whole.touch()
    assert parallelize.remove_stale_files(tmp_path) == ["key.main"]
    assert list(library.parent.iterdir()) == [whole]


def test_what_somebody_is_building_stays(tmp_path: Path) -> None:
    for folder in ("ab", parallelize.HEADERS):
        (tmp_path / folder / f"key.main{parallelize.BUILDING}").mkdir(parents=True)
        (tmp_path / folder / "key.main.so").touch()
    for locks in (tmp_path / "locks", tmp_path / parallelize.HEADERS / "locks"):
        locks.mkdir()
    with lock_file(tmp_path / "locks" / "key.lock", 1):
        assert parallelize.remove_stale_files(tmp_path) == ["key.main"]
        assert (tmp_path / "ab" / "key.main.so").exists()
        assert not (tmp_path / parallelize.HEADERS / "key.main.so").exists()
    assert parallelize.remove_stale_files(tmp_path) == ["key.main"]
    assert not (tmp_path / "ab" / "key.main.so").exists()


def test_a_build_whose_lock_has_another_name_is_left_alone(tmp_path: Path) -> None:
    # Such as what torch compiles once more, optimised, under the lock of the first.
    (tmp_path / "ab" / f"key.optimized{parallelize.BUILDING}").mkdir(parents=True)
    (tmp_path / "locks").mkdir()
    assert parallelize.remove_stale_files(tmp_path) == []
    assert (tmp_path / "ab" / f"key.optimized{parallelize.BUILDING}").exists()


def test_code_that_another_user_could_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache, theirs = Path(default_cache_dir()), tmp_path / "theirs"
    theirs.mkdir()
    cache.symlink_to(theirs)
    assert find_compile_problem(torch.device("cpu")).startswith(f"{cache}, whose code torch would run")
    with pytest.raises(ConfigError, match="TMPDIR"):
        compile_units(torch.nn.Linear(1, 1), [])  # type: ignore[arg-type]
    cache.unlink()
    cache.mkdir()
    if os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
        with pytest.raises(ConfigError, match="another user's"):
            parallelize.check_cache_owner(cache)
    cache.rmdir()
    parallelize.check_cache_owner(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    parallelize.check_cache_owner(cache)
