"""Where an export goes: a local folder, or through a temporary one to a URL, file by file."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config.schema import Config
from phalanx.core.errors import ConfigError, PhalanxError
from phalanx.core.run_paths import Url
from phalanx.data.cache import temporary_folder
from phalanx.storage import files as storage

WRITE_LAST = ("config.json", "adapter_config.json")  # what makes a folder a model, or an adapter, to those who load it


@contextlib.contextmanager
def open_export_target(folder: Path | Url, config: Config) -> Iterator[tuple[Path, Callable[[Path], None] | None]]:
    """A local folder to write to, and what takes a finished file away from it (None where it may stay).

    What is written there is at the URL when the block ends, LAST at last. When it fails, what has been copied is
    removed as far as the store lets it. Raises ConfigError when there is something at the URL, else as `storage` does.
    """
    if isinstance(folder, Path):
        yield folder, None
        return
    if storage.list_folder(folder.text, timeout_s=folder.timeout_s):
        raise ConfigError(f"{folder} is not empty, so an export would mix with what is there; name a new URL")
    copied: list[str] = []

    def take(path: Path) -> None:
        copied.append((folder / path.name).text)
        storage.upload(path, copied[-1], folder.timeout_s)
        path.unlink()

    cache = storage.local_cache(config.data.cache)
    with temporary_folder(cache) as temporary:
        local = temporary / folder.name
        try:
            yield local, take
            for path in sorted(local.iterdir(), key=lambda path: (path.name in WRITE_LAST, path.name)):
                take(path)
        except BaseException:
            with contextlib.suppress(PhalanxError):
                storage.remove(copied, folder.timeout_s)
            raise
