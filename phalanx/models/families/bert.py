"""BERT: encoders with heads for masked tokens, the next sentence, labels of tokens and labels of sequences.

The network is `models/bert.py`. Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.layout.model_shape import MASKED_FRACTION, EncoderSpec, ModelSpec, Shapes
from phalanx.models.families.family import (
    KEYS,
    BlockOptions,
    HuggingFaceMapping,
    ModelFamily,
    TaskChoice,
    name_both,
    read_count,
    read_number,
)

# What a config.json calls BERT with one head or another -> our word for the head (EncoderSpec.objective).
_CLASSES = {
    "BertForMaskedLM": "masked",
    "BertForPreTraining": "masked-next",
    "BertForTokenClassification": "tags",
    "BertForSequenceClassification": "classes",
}
# Our module name -> the name in a Hugging Face folder; {i} is the layer.
_PARTS: dict[str, str] = {
    "embed.norm": "bert.embeddings.LayerNorm",
    "layers.{i}.attention.q": "bert.encoder.layer.{i}.attention.self.query",
    "layers.{i}.attention.k": "bert.encoder.layer.{i}.attention.self.key",
    "layers.{i}.attention.v": "bert.encoder.layer.{i}.attention.self.value",
    "layers.{i}.attention.o": "bert.encoder.layer.{i}.attention.output.dense",
    "layers.{i}.attention_norm": "bert.encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.mlp.up": "bert.encoder.layer.{i}.intermediate.dense",
    "layers.{i}.mlp.down": "bert.encoder.layer.{i}.output.dense",
    "layers.{i}.mlp_norm": "bert.encoder.layer.{i}.output.LayerNorm",
    "head.pooler": "bert.pooler.dense",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.next": "cls.seq_relationship",
    "head.classifier": "classifier",
}
HF_NAMES: dict[str, str] = {
    "embed.words.weight": "bert.embeddings.word_embeddings.weight",
    "embed.positions.weight": "bert.embeddings.position_embeddings.weight",
    "embed.segments.weight": "bert.embeddings.token_type_embeddings.weight",
    "head.bias": "cls.predictions.bias",
} | name_both(_PARTS)
_BERT_BASE = ModelSpec(
    architecture="bert", vocab_size=30522, hidden=768, layers=12, heads=12, kv_heads=12, head_dim=64, intermediate=3072,
    max_seq_len=512, norm_eps=1e-12, tie_embeddings=True, encoder=EncoderSpec(),
)  # fmt: skip
_BERT_LARGE = replace(_BERT_BASE, hidden=1024, layers=24, heads=16, kv_heads=16, intermediate=4096)


def encoder_of(spec: ModelSpec) -> EncoderSpec:
    """The encoder's part of a shape."""
    return spec.encoder or EncoderSpec()


def _find_shapes(spec: ModelSpec, options: BlockOptions) -> Shapes:
    width, encoder = spec.hidden, encoder_of(spec)

    def dense(name: str, out: int, inner: int) -> Shapes:
        return {f"{name}.weight": (out, inner), f"{name}.bias": (out,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    shapes: Shapes = {
        "embed.words.weight": (spec.vocab_size, width),
        "embed.positions.weight": (spec.max_seq_len, width),
        "embed.segments.weight": (encoder.segment_kinds, width),
        **norm("embed.norm"),
    }
    block: Shapes = {}
    for name in "qkvo":
        block |= dense(f"attention.{name}", width, width)
    block |= norm("attention_norm")
    block |= dense("mlp.up", spec.intermediate, width) | dense("mlp.down", width, spec.intermediate) | norm("mlp_norm")
    for layer in range(spec.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    masks = encoder.objective in ("masked", "masked-next")
    shapes |= {"head.bias": (spec.vocab_size,)} if masks else {}
    if encoder.objective in ("masked-next", "classes"):
        shapes |= dense("head.pooler", width, width)
    if masks:
        shapes |= dense("head.transform", width, width) | norm("head.norm")
    if encoder.objective == "masked-next":
        shapes |= dense("head.next", 2, width)
    if encoder.objective in ("tags", "classes"):
        shapes |= dense("head.classifier", len(encoder.labels), width)
    return shapes


def _count_flops(spec: ModelSpec, seq_len: int, shapes: Shapes) -> tuple[int, int]:
    """FLOPs per token of BERT. Attention is not causal. The head computes a part of the positions: MASKED_FRACTION of
    them for masked tokens, one with a pooler."""
    objective = encoder_of(spec).objective
    blocks = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
    flops = 6.0 * blocks + 12.0 * spec.hidden * spec.layers * seq_len
    for name, shape in shapes.items():
        if name.startswith("head.") and len(shape) == 2:
            pooled = name.startswith(("head.pooler", "head.next")) or objective == "classes"
            each = MASKED_FRACTION if name.startswith("head.transform") else 1.0
            flops += 6.0 * math.prod(shape) * (1.0 / seq_len if pooled else each)
    if objective.startswith("masked"):
        flops += 6.0 * MASKED_FRACTION * spec.vocab_size * spec.hidden  # the embedding, as the head's last matrix
    return int(flops), int(flops)


def _find_problems(spec: ModelSpec) -> list[str]:
    """Problems of a shape as a BERT."""
    found, kinds = [], encoder_of(spec).segment_kinds
    if spec.sliding_window is not None:
        found.append(f"model.sliding_window is {spec.sliding_window}, but each position of BERT sees all; remove it.")
    if spec.rope_scaling is not None:
        found.append("model.rope_scaling stretches rotary positions, which BERT does not have; remove it.")
    if spec.kv_heads != spec.heads or spec.head_dim * spec.heads != spec.hidden:
        found.append(
            f"model.heads is {spec.heads}, kv_heads {spec.kv_heads} and head_dim {spec.head_dim}, but BERT's heads "
            f"share nothing and divide its width of {spec.hidden}; remove model.kv_heads and model.head_dim, and "
            "set model.hidden to a multiple of model.heads."
        )
    if not spec.tie_embeddings:
        found.append("model.tie_embeddings is false, but BERT's head is its embedding; remove it.")
    if kinds < 2:
        found.append(f"the table of segments has {kinds} rows, but a pair of texts needs 2; use another model.")
    return found


def _start(spec: ModelSpec) -> ModelSpec:
    wide = 4 * spec.hidden
    return replace(spec, intermediate=wide, norm_eps=1e-12, tie_embeddings=True, encoder=EncoderSpec())


def _complete(spec: ModelSpec, given: Mapping[str, Any], task: TaskChoice) -> ModelSpec:
    """Complete the shape by the head that its task needs."""
    heads = {"masked": "masked-next" if task.next_sentence else "masked", "tag": "tags", "classify": "classes"}
    objective = heads.get("masked" if task.kind == "auto" else task.kind, "language")
    labels = task.labels if objective in ("tags", "classes") else ()
    spec = replace(spec, encoder=replace(encoder_of(spec), objective=objective, labels=labels))
    if "hidden" in given or "heads" in given:  # the heads of a preset no longer apply
        spec = replace(
            spec,
            kv_heads=spec.kv_heads if "kv_heads" in given else spec.heads,
            head_dim=spec.head_dim if "head_dim" in given else max(1, spec.hidden // spec.heads),
        )
    return spec


# ------------------------------------------------------------------------------------------------------- Hugging Face's


def labels_of(config: Mapping[str, Any]) -> list[str] | None:
    """The label names of a fine-tuned folder, by number; None where it does not define them."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or _CLASSES.get(str(named[0])) not in ("tags", "classes"):
        return None
    names = config.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(len(names))):
        return None
    return [str(names[str(number)]) for number in range(len(names))]


def _read(config: dict[str, Any], fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Read the shape of a BERT, without a head, which depends on the task."""
    return {
        "kv_heads": fields["heads"],
        "head_dim": fields["hidden"] // max(1, fields["heads"]),
        "tie_embeddings": True,
        "encoder": EncoderSpec(segment_kinds=read_count(config, "type_vocab_size", where)),
    }


def _write(spec: ModelSpec, original: dict[str, Any]) -> dict[str, Any]:
    encoder = encoder_of(spec)
    written: dict[str, Any] = {
        "type_vocab_size": encoder.segment_kinds,
        "hidden_act": "gelu",
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.attention_dropout,
        "position_embedding_type": "absolute",
        "pad_token_id": original.get("pad_token_id", 0),
        "tie_word_embeddings": True,
    }
    if encoder.labels:
        written["id2label"] = {str(number): label for number, label in enumerate(encoder.labels)}
        written["label2id"] = {label: number for number, label in enumerate(encoder.labels)}
    if encoder.objective == "classes":
        written["problem_type"] = "single_label_classification"
    return written


BERT = ModelFamily(
    name="bert",
    title="BERT",
    network="phalanx.models.bert:Bert",
    tasks=("masked", "tag", "classify"),
    options=BlockOptions(
        causal=False,
        norm="layer",
        gated=False,
        activation="gelu",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        position_offset=0,
    ),
    shapes=_find_shapes,
    flops=_count_flops,
    find_problems=_find_problems,
    start=_start,
    complete=_complete,
    presets={
        "bert-tiny": replace(_BERT_BASE, hidden=128, layers=2, heads=2, kv_heads=2, intermediate=512),
        "bert-mini": replace(_BERT_BASE, hidden=256, layers=4, heads=4, kv_heads=4, intermediate=1024),
        "bert-small": replace(_BERT_BASE, hidden=512, layers=4, heads=8, kv_heads=8, intermediate=2048),
        "bert-medium": replace(_BERT_BASE, hidden=512, layers=8, heads=8, kv_heads=8, intermediate=2048),
        "bert-base-uncased": _BERT_BASE,
        "bert-base-cased": replace(_BERT_BASE, vocab_size=28996),
        "bert-large-uncased": _BERT_LARGE,
        "bert-large-cased": replace(_BERT_LARGE, vocab_size=28996),
    },
    hf=HuggingFaceMapping(
        model_type="bert",
        classes=_CLASSES,
        # Initial weights only: their own heads are ignored, and the head is drawn.
        headless=(
            "BertModel",
            "BertForNextSentencePrediction",
            "BertForQuestionAnswering",
            "BertForMultipleChoice",
        ),
        names=HF_NAMES,
        keys=KEYS | {"norm_eps": ("layer_norm_eps", read_number, 1e-12)},
        read=_read,
        write=_write,
        forgotten=("id2label", "label2id", "num_labels"),
        cut_by_transform=False,
        accepted={
            "hidden_act": ("gelu", None),
            "position_embedding_type": ("absolute", None),
            "is_decoder": (False, None),
            "add_cross_attention": (False, None),
            "tie_word_embeddings": (True, None),
            "quantization_config": (None,),
            "chunk_size_feed_forward": (0, None),
        },
        defaults={
            "vocab_size": 30522,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
    ),
)
