"""A tiny model of each family of decoders, by its config.json, and transformers' own with random weights."""

from typing import Any

import torch
import transformers

from phalanx.layout.model_shape import ModelSpec
from phalanx.models.hf_config import spec_from_config
from phalanx.models.model import Architecture
from phalanx.models.user_model import load_family_class
from tests.published_models import PublishedModel, make_tensors

VOCAB, LENGTH = 61, 24
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
PUBLISHED = ("internlm2", "baichuan", "qwen")  # which transformers has no class of
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4}
# What it shows -> config.json, beside BASE; the class is that of `model_type`.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    "gemma3": {
        "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 10,
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt_neox, in turn": {
        "model_type": "gpt_neox", "use_parallel_residual": False, "hidden_act": "gelu_fast", "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "falcon, 7B kind": {"model_type": "falcon", "ffn_hidden_size": 48},
    "falcon, new decoder": {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
        "tie_word_embeddings": False,
    },
    "falcon, alibi": {
        "model_type": "falcon", "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True,
        "num_attention_heads": 6, "hidden_size": 36, "ffn_hidden_size": 48,
    },
    "gemma2": {
        "model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5, "num_hidden_layers": 3,
        "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "phi3": {
        "model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 7, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-4,
    },
    "phi3, longrope": {
        "model_type": "phi3", "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": LENGTH - 4,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 3.0, 5.5]},
    },
    "gpt2": {"model_type": "gpt2", "n_inner": 48, "n_positions": 64} | GPT,
    "gptj": {"model_type": "gptj", "rotary_dim": 4, "n_positions": 64} | GPT,
    "opt": {"model_type": "opt", "ffn_dim": 48},
    "opt, 350M kind": {
        "model_type": "opt", "ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 20,
    },
    "opt, narrow embedding": {
        "model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 20, "tie_word_embeddings": False,
    },
    "olmo2": {"model_type": "olmo2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "internlm2": {
        "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "num_key_value_heads": 2, "bias": True,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    },
    "baichuan": {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "rms_norm_eps": 1e-6},
    "baichuan2": {"model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "rms_norm_eps": 1e-6},
    "baichuan, alibi": {
        "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "rms_norm_eps": 1e-6,
        "num_attention_heads": 6, "hidden_size": 36, "model_max_length": 64, "max_position_embeddings": None,
    },
    "baichuan2, alibi": {
        "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "rms_norm_eps": 1e-6,
        "model_max_length": 64, "max_position_embeddings": None, "z_loss_weight": 0,
    },
    "qwen": {
        "model_type": "qwen", "architectures": ["QWenLMHeadModel"], "seq_length": 64, "intermediate_size": 96,
        "layer_norm_epsilon": 1e-6,
    },
    "olmo2, one key head": {"model_type": "olmo2", "num_key_value_heads": 1},
    "mixtral": {
        "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 5, "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "mlp_only_layers": [0], "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 5,
        "num_experts_per_tok": 2, "sliding_window": 5, "num_hidden_layers": 3,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 18,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "num_hidden_layers": 3, "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0,
            "mscale_all_dim": 0.7, "rope_theta": 10000.0,
        },
    },
    "deepseek_v3, wide queries": {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 18,
        "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 5, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 0,
        "n_shared_experts": 1, "num_nextn_predict_layers": 0, "norm_topk_prob": False,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2},
}  # fmt: skip


def full_config(kind: str) -> dict[str, Any]:
    """The config.json of a kind, without the name of a class."""
    return BASE | CONFIGS[kind]


def spec_of(kind: str) -> ModelSpec:
    """Our shape of it."""
    return spec_from_config(full_config(kind), kind)


def class_of(kind: str) -> type[Architecture]:
    """Our class of it."""
    return load_family_class(spec_of(kind).architecture)


def attention_of(config: Any) -> str:
    """transformers' attention: plain, but for Falcon's with ALiBi, which adds the biases twice there."""
    return "sdpa" if getattr(config, "alibi", False) else "eager"


def theirs_of(kind: str) -> Any:
    """transformers' model, or the published formula, far from the start of training: attention is sharp, and biases and
    norms do something."""
    torch.manual_seed(0)
    config: Any = full_config(kind)
    model: Any
    if config["model_type"] in PUBLISHED:
        model = PublishedModel(config, make_tensors(config))
    else:
        config = transformers.AutoConfig.for_model(**config)
        config._attn_implementation = attention_of(config)
        config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config)
    corrections = [each for each in model.named_buffers() if each[0].endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            parameter.normal_(std=0.3 if parameter.dim() == 1 else 0.2)
            if parameter.dim() == 1 and name.endswith("weight"):
                parameter += 1.0
    return model.eval()
