"""Local copies of the folders that a recipe names by URL, or by name on the Hugging Face hub: model.from_hf,
model.lora.adapter and data.tokenizer.

A run's configuration keeps the URLs, which are the same on every machine; whoever opens the folders takes
`use_local_copies` of it.
"""

from collections.abc import Collection
from typing import Any

from phalanx.config.load import update_config
from phalanx.config.schema import Config
from phalanx.storage import hub, local_copies

FOLDER_KEYS = ("model.from_hf", "model.lora.adapter", "data.tokenizer")


def use_local_copies(config: Config) -> Config:
    """The configuration with the local copies in the place of the URLs; they need not be there yet."""
    found = _urls(config)
    return update_config(
        config, {key: str(local_copies.local_copy_path(url, config.data.cache)) for key, url in found.items()}
    )


def fetch_local_copies(config: Config, weights: bool = True, keys: Collection[str] = FOLDER_KEYS) -> Config:
    """The same, with every copy of `keys` there, if need be without weights, and as new as its original.

    Raises ConfigError, StorageError.
    """
    for url in {url for key, url in _urls(config).items() if key in keys}:
        local_copies.fetch_folder(url, config.data.cache, config.resilience.storage_timeout_s, weights)
    return use_local_copies(config)


def pin_commits(config: Config) -> list[tuple[str, str, str]]:
    """For each key that names a model on the hub without a commit: (key, the name with the commit that was fetched,
    why). With these a resumed run reads the same files, wherever the branch points by then."""
    pinned = []
    for key, name in _urls(config).items():
        if hub.is_hub_name(name):
            link = local_copies.fetch_folder(name, config.data.cache, config.resilience.storage_timeout_s)
            if (exact := hub.pin_commit(name, link)) != name:
                pinned.append((key, exact, f"the commit of {name} when the run began"))
    return pinned


def find_original_url(value: Any, with_urls: Config) -> Any:
    """The URL that a value of the resolved configuration is the copy of, else the value."""
    copies = {str(local_copies.local_copy_path(url, with_urls.data.cache)): url for url in _urls(with_urls).values()}
    return copies.get(value, value) if isinstance(value, str) else value


def restore_urls(config: Config, with_urls: Config) -> Config:
    """The opposite of `use_local_copies`: the URLs of `with_urls` in the place of their copies."""
    return update_config(
        config, {key: find_original_url(value, with_urls) for key, value in _folder_values(config).items()}
    )


def _urls(config: Config) -> dict[str, str]:
    return {key: value for key, value in _folder_values(config).items() if local_copies.is_remote(value)}


def _folder_values(config: Config) -> dict[str, str]:
    lora = config.model.lora
    values = (config.model.from_hf, lora.adapter if lora is not None else None, config.data.tokenizer)
    return {key: value for key, value in zip(FOLDER_KEYS, values, strict=True) if value is not None}
