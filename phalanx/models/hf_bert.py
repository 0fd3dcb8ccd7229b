"""config.json of BERT's folders, in and out."""

import json
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.layout.model_shape import ModelSpec

# What a config.json calls BERT with one head or another -> our word for the head.
ARCHITECTURES = {
    "BertForMaskedLM": "masked",
    "BertForPreTraining": "masked-next",
    "BertForTokenClassification": "tags",
    "BertForSequenceClassification": "classes",
}
# Only as a start: what they have beside the model itself is left out, and the head is drawn.
HEADLESS = ("BertModel", "BertForNextSentencePrediction", "BertForQuestionAnswering", "BertForMultipleChoice")
# Keys that would change the mathematics in a way that is not built here, and the values that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu", None),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_word_embeddings": (True, None),
    "quantization_config": (None,),
    "chunk_size_feed_forward": (0, None),
}
DEFAULTS: dict[str, int] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def is_bert(config: dict[str, Any]) -> bool:
    """Whether a config.json describes a BERT, by its architectures or, where it names none, by its model_type."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0] in ARCHITECTURES or named[0] in HEADLESS
    return config.get("model_type") == "bert"


def check_bert_config(config: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a feature that is not built here."""
    for name, accepted in UNSUPPORTED.items():
        if config.get(name) not in accepted:
            raise ConfigError(
                f"{where} sets {name}: {json.dumps(config[name])}, which is not supported and would change the model's "
                f"output; use a model with {name}: {json.dumps(accepted[0])}."
            )


def labels_of(config: dict[str, Any]) -> list[str] | None:
    """The names of the labels of a fine-tuned folder, by number; None where it has none of its own."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or ARCHITECTURES.get(str(named[0])) not in ("tags", "classes"):
        return None
    names = config.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(str(number) for number in range(len(names))):
        return None
    return [str(names[str(number)]) for number in range(len(names))]


def config_of(spec: ModelSpec, dtype_name: str, original: dict[str, Any], pad_id: int | None = None) -> dict[str, Any]:
    """The config.json of a BERT; keys of `original` that do not describe the shape are kept."""
    architecture = next(theirs for theirs, ours in ARCHITECTURES.items() if ours == spec.objective)
    written = {
        **{key: value for key, value in original.items() if key not in ("id2label", "label2id", "num_labels")},
        "architectures": [architecture],
        "model_type": "bert",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_seq_len,
        "type_vocab_size": spec.segment_kinds,
        "layer_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "hidden_act": "gelu",
        "hidden_dropout_prob": spec.dropout,
        "attention_probs_dropout_prob": spec.attention_dropout,
        "position_embedding_type": "absolute",
        "pad_token_id": original.get("pad_token_id", 0) if pad_id is None else pad_id,
        "tie_word_embeddings": True,
        "torch_dtype": dtype_name,
        "dtype": dtype_name,
    }
    if spec.labels:
        written["id2label"] = {str(number): label for number, label in enumerate(spec.labels)}
        written["label2id"] = {label: number for number, label in enumerate(spec.labels)}
    if spec.objective == "classes":
        written["problem_type"] = "single_label_classification"
    return written
