"""Full state dicts: `FullStateDictConfig(translate_on_save=...)`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullStateDictConfig

from phalanx.api.fsdp.patches import replace


def with_translation() -> None:
    """Have `FullStateDictConfig` take `translate_on_save`.

    A transformed model keeps the names and the layout of Hugging Face here, so there is nothing to translate.
    """
    replace(FullStateDictConfig, "__init__", _taking)


def _taking(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, translate_on_save: bool = True, **options: Any) -> None:
        original(self, *args, **options)
        if not torch.accelerator.is_available():
            self.offload_to_cpu = False  # it is there already; FSDP would hand out memory that it then frees
        self.translate_on_save = translate_on_save

    return init
