"""Local copies of the folders that a recipe names by URL: model.from_hf, model.lora.adapter and data.tokenizer.

A run's configuration keeps the URLs, which are the same on every machine; whoever opens the folders takes `here` of it.
"""

from typing import Any

from phalanx.config.load import update
from phalanx.config.schema import Config
from phalanx.storage import files as storage

KEYS = ("model.from_hf", "model.lora.adapter", "data.tokenizer")


def here(config: Config) -> Config:
    """The configuration with the local copies in the place of the URLs; they need not be there yet."""
    found = _urls(config)
    return update(config, {key: str(storage.copy_of(url, config.data.cache)) for key, url in found.items()})


def fetched(config: Config, weights: bool = True) -> Config:
    """The same, with every copy there, if need be without weights, and as new as its original.

    Raises ConfigError, StorageError.
    """
    for url in set(_urls(config).values()):
        storage.fetch_folder(url, config.data.cache, config.resilience.storage_timeout_s, weights)
    return here(config)


def original(value: Any, wanted: Config) -> Any:
    """The URL that a value of the resolved configuration is the copy of, else the value."""
    copies = {str(storage.copy_of(url, wanted.data.cache)): url for url in _urls(wanted).values()}
    return copies.get(value, value) if isinstance(value, str) else value


def restored(config: Config, wanted: Config) -> Config:
    """The opposite of `here`: the URLs of `wanted` in the place of their copies."""
    return update(config, {key: original(value, wanted) for key, value in _named(config).items()})


def _urls(config: Config) -> dict[str, str]:
    return {key: value for key, value in _named(config).items() if storage.is_url(value)}


def _named(config: Config) -> dict[str, str]:
    lora = config.model.lora
    values = (config.model.from_hf, lora.adapter if lora is not None else None, config.data.tokenizer)
    return {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}
