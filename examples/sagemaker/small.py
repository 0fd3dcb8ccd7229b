"""What the scripts of this folder train: tiny models, and a text that repeats itself."""

import torch
from transformers import GPTNeoXConfig, LlamaConfig

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 6, 8, 16, 64


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip


def neox_config() -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip


def batch(step: int, rank: int, size: int) -> torch.Tensor:
    """A rank's sequences of a step: the same ones for all ranks together, however many there are."""
    starts = torch.arange(GLOBAL_BATCH)[rank::size].unsqueeze(1) * 7 + step
    return (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
