"""`LlamaFlashAttention`: transformers' attention of Llama, whatever the model was asked for, by a fused kernel."""

import copy
from typing import Any

from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.utils import is_flash_attn_2_available

from phalanx.core.errors import ConfigError


class LlamaFlashAttention(LlamaAttention):
    """Attention of a layer of Llama, to be put in the place of the layer's own, with its weights: by flash_attn where
    that is installed and there is a GPU, else by PyTorch's `scaled_dot_product_attention`.

    `config`: the model's; it is left as it is. `layer_idx`: which layer, which a cache of keys and values has to know.
    """

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        own = copy.deepcopy(config)
        own._attn_implementation = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        layer: Any = layer_idx
        super().__init__(own, layer)

    def forward(self, *args: Any, **options: Any) -> Any:
        """As transformers has it. Raises ConfigError for a cache where the layer's number was not given."""
        if options.get("past_key_values") is not None and self.layer_idx is None:
            raise ConfigError(
                "LlamaFlashAttention has no layer index, so it cannot use the key-value cache; set use_cache to "
                "False in the model's config, or give layer_idx"
            )
        return super().forward(*args, **options)
