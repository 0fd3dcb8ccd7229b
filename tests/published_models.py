"""Families that transformers has no class of, in plain formulas on tensors by their published names: the references
that ours are compared with. Written after the published descriptions and layouts of their checkpoints."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass
class Output:
    """What a model of transformers returns, as far as it is looked at."""

    logits: Tensor


class PublishedModel(nn.Module):
    """A model of a config.json and named tensors."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.config, self.names = config, list(tensors)
        self.values = nn.ParameterList(tensors.values())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return zip(self.names, self.values, strict=True)

    def get_parameter(self, target: str) -> nn.Parameter:
        return dict(self.named_parameters())[target]

    def save_pretrained(self, folder: Path, **how: Any) -> None:
        Path(folder).mkdir(exist_ok=True)
        save_file({name: each.detach() for name, each in self.named_parameters()}, Path(folder) / "model.safetensors")
        (Path(folder) / "config.json").write_text(json.dumps(self.config))

    def forward(self, tokens: Tensor) -> Output:
        held, config = dict(self.named_parameters()), self.config
        own = {"internlm2": internlm2, "baichuan": baichuan, "qwen": qwen}[config["model_type"]]
        eps = config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-6))
        base = config.get("rope_theta", config.get("rotary_emb_base", 10000.0))
        x = held[own.embed][tokens]
        for layer in range(config["num_hidden_layers"]):
            part = {key: each for key, each in own(held, config, layer).items() if each is not None}
            given = rms_norm(x, part["norm1"], eps)
            q, k, v = part["split"](F.linear(given, part["qkv"], part.get("qkv_bias")))
            if far := config.get("max_position_embeddings", 1) is None:
                mixed = attend(q, k, v, published_slopes(config["num_attention_heads"])).flatten(2)
            else:
                mixed = attend(turn(q, base), turn(k, base), v).flatten(2)
            x = x + F.linear(mixed, part["o"], part.get("o_bias"))
            given = rms_norm(x, part["norm2"], eps)
            x = x + F.linear(F.silu(F.linear(given, part["gate"])) * F.linear(given, part["up"]), part["down"])
        head = held[own.head]
        if config.get("architectures") == ["BaichuanForCausalLM"] and (not far or "z_loss_weight" in config):
            head = head / head.norm(dim=1, keepdim=True)
        return Output(F.linear(rms_norm(x, held[own.norm], eps), head))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, base: float) -> Tensor:
    """Rotary positions of x (B, S, heads, channels): each channel of the first half with one of the second."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angles = (torch.arange(x.shape[1]).float()[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def published_slopes(heads: int) -> list[float]:
    """The slopes of ALiBi, by the rule of its paper: with 8 heads 1/2, 1/4, ... 1/256."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return published_slopes(lower) + published_slopes(2 * lower)[::2][: heads - lower]


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: list[float] | None = None) -> Tensor:
    """Causal attention of (B, S, heads, channels), with ALiBi of these slopes if given."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    if slopes is not None:
        scores = scores + torch.tensor(slopes).to(scores)[:, None, None] * torch.arange(q.shape[1]).to(scores)
    hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def internlm2(held: dict[str, Tensor], config: dict[str, Any], layer: int) -> dict[str, Any]:
    """The matrix of queries, keys and values goes key head by key head: its queries, its keys, its values."""
    at, heads, keys = f"model.layers.{layer}.", config["num_attention_heads"], config["num_key_value_heads"]

    def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.unflatten(-1, (keys, heads // keys + 2, config["hidden_size"] // heads))
        return x[..., :-2, :].flatten(2, 3), x[..., -2, :], x[..., -1, :]

    return {
        "split": split, "qkv": held[f"{at}attention.wqkv.weight"], "qkv_bias": held.get(f"{at}attention.wqkv.bias"),
        "o": held[f"{at}attention.wo.weight"], "o_bias": held.get(f"{at}attention.wo.bias"),
        "norm1": held[f"{at}attention_norm.weight"], "norm2": held[f"{at}ffn_norm.weight"],
        "gate": held[f"{at}feed_forward.w1.weight"], "up": held[f"{at}feed_forward.w3.weight"],
        "down": held[f"{at}feed_forward.w2.weight"],
    }  # fmt: skip


def thirds(config: dict[str, Any]) -> Any:
    """All queries, then all keys, then all values."""
    heads = config["num_attention_heads"]
    return lambda x: [each.unflatten(-1, (heads, -1)) for each in x.chunk(3, -1)]


def baichuan(held: dict[str, Tensor], config: dict[str, Any], layer: int) -> dict[str, Any]:
    at = f"model.layers.{layer}."
    return {
        "split": thirds(config), "qkv": held[f"{at}self_attn.W_pack.weight"],
        "o": held[f"{at}self_attn.o_proj.weight"], "norm1": held[f"{at}input_layernorm.weight"],
        "norm2": held[f"{at}post_attention_layernorm.weight"], "gate": held[f"{at}mlp.gate_proj.weight"],
        "up": held[f"{at}mlp.up_proj.weight"], "down": held[f"{at}mlp.down_proj.weight"],
    }  # fmt: skip


def qwen(held: dict[str, Tensor], config: dict[str, Any], layer: int) -> dict[str, Any]:
    """The activation is that of w2, and what it multiplies is w1's."""
    at = f"transformer.h.{layer}."
    return {
        "split": thirds(config), "qkv": held[f"{at}attn.c_attn.weight"], "qkv_bias": held[f"{at}attn.c_attn.bias"],
        "o": held[f"{at}attn.c_proj.weight"], "norm1": held[f"{at}ln_1.weight"], "norm2": held[f"{at}ln_2.weight"],
        "gate": held[f"{at}mlp.w2.weight"], "up": held[f"{at}mlp.w1.weight"], "down": held[f"{at}mlp.c_proj.weight"],
    }  # fmt: skip


for _own, _names in {
    internlm2: ("model.tok_embeddings.weight", "model.norm.weight", "output.weight"),
    baichuan: ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    qwen: ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"),
}.items():
    vars(_own).update(zip(("embed", "norm", "head"), _names, strict=True))


def make_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Zeros in the published shapes."""
    width, vocab, heads = config["hidden_size"], config["vocab_size"], config["num_attention_heads"]
    inner, keys = config["intermediate_size"], config.get("num_key_value_heads", heads)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config["num_hidden_layers"]):
        match config["model_type"]:
            case "internlm2":
                at, packed = f"model.layers.{layer}.", (heads + 2 * keys) * width // heads
                shapes |= {f"{at}attention.wqkv.weight": (packed, width), f"{at}attention.wo.weight": (width, width)}
                if config["bias"]:
                    shapes |= {f"{at}attention.wqkv.bias": (packed,), f"{at}attention.wo.bias": (width,)}
                shapes |= {f"{at}attention_norm.weight": (width,), f"{at}ffn_norm.weight": (width,)}
                shapes |= {f"{at}feed_forward.{name}.weight": (inner, width) for name in ("w1", "w3")}
                shapes[f"{at}feed_forward.w2.weight"] = (width, inner)
            case "baichuan":
                at = f"model.layers.{layer}."
                shapes |= {f"{at}self_attn.W_pack.weight": (3 * width, width)}
                shapes |= {f"{at}self_attn.o_proj.weight": (width, width), f"{at}mlp.down_proj.weight": (width, inner)}
                shapes |= {f"{at}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
                shapes |= {f"{at}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
            case "qwen":
                at = f"transformer.h.{layer}."
                shapes |= {f"{at}attn.c_attn.weight": (3 * width, width), f"{at}attn.c_attn.bias": (3 * width,)}
                shapes |= {f"{at}attn.c_proj.weight": (width, width), f"{at}mlp.c_proj.weight": (width, inner // 2)}
                shapes |= {f"{at}mlp.{name}.weight": (inner // 2, width) for name in ("w1", "w2")}
                shapes |= {f"{at}ln_{number}.weight": (width,) for number in (1, 2)}
    own: Any = {"internlm2": internlm2, "baichuan": baichuan, "qwen": qwen}[config["model_type"]]
    shapes |= {own.embed: (vocab, width), own.norm: (width,), own.head: (vocab, width)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def load_published(folder: Path, dtype: torch.dtype) -> PublishedModel:
    """A folder's model."""
    config = json.loads((folder / "config.json").read_text())
    tensors = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return PublishedModel(config, {name: each.to(dtype) for part in tensors for name, each in part.items()})
