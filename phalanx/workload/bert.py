"""BERT as a subject: masked tokens, labels of words and labels of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phalanx.core.errors import ConfigError
from phalanx.data.bert_rows import (
    IGNORE_INDEX,
    LabelledRows,
    LabelledSample,
    LabelRowOptions,
    MaskedSample,
    MaskingOptions,
    PremaskedRows,
    make_masked_rows,
    order_labels,
)
from phalanx.data.loader import SampleSet
from phalanx.data.record_files import RecordFile, TokenFile
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.families.bert import encoder_of, labels_of
from phalanx.models.families.catalog import flops_per_token
from phalanx.models.hf_config import read_config
from phalanx.models.hf_weights import Weights
from phalanx.models.model import Model
from phalanx.models.user_model import build_on_meta, load_family_class
from phalanx.optim.update import Shard
from phalanx.parallel.init_weights import Fill, make_hf_fill, make_random_fill
from phalanx.tasks.labels import SequenceClassificationTask, TokenClassificationTask
from phalanx.tasks.masked import MaskedLMTask
from phalanx.tasks.task import Task

if TYPE_CHECKING:
    from phalanx.config.schema import Config

CLASSIFIER = "head.classifier."


class BertWorkload:
    """A BERT with the head that its task needs."""

    def __init__(self, config: "Config", spec: ModelSpec) -> None:
        self.spec: ModelSpec | None = spec
        self._config, self._spec = config, spec
        self._shards = config.data.format == "masked"  # when it was written
        self._encoder, self._code = encoder_of(spec), load_family_class(spec.architecture)
        self._masks = self._encoder.objective in ("masked", "masked-next")
        # The speed of labelled texts counts texts: they are short, and how much of a row is padding varies.
        self.unit = "tokens" if self._masks else "samples"
        self.positions = config.data.seq_len if self._masks else 1
        self.takes_whole_share = False

    def model(self, layers: int | None = None) -> Model:
        return build_on_meta(self._spec if layers is None else replace(self._spec, layers=layers), self._code)

    def mask_form(self) -> MaskingOptions:
        """How text becomes masked rows."""
        task = self._config.task
        return MaskingOptions(self._config.data.seq_len, task.mask_share, task.next_sentence, task.whole_word)

    def task(self) -> Task:
        seq_len = self._config.data.seq_len
        if self._encoder.objective == "tags":
            return TokenClassificationTask(seq_len, self._encoder.labels)
        if self._encoder.objective == "classes":
            return SequenceClassificationTask(seq_len, self._encoder.labels)
        form = self.mask_form()
        return MaskedLMTask(seq_len, form.max_predicted, form.pairs, full_rows=not (form.pairs or self._shards))

    def rows(self, folder: Path, seed: int, held_out: bool = False) -> SampleSet:
        """The samples of a prepared set."""
        if self._shards:
            return PremaskedRows(RecordFile(folder), self.mask_form())
        if self._masks:
            return make_masked_rows(TokenFile(folder), self.mask_form(), seed, held_out)
        drop = self._config.data.too_long == "drop"
        return LabelledRows(RecordFile(folder), LabelRowOptions(self._config.data.seq_len, self._encoder.labels, drop))

    def train_data(self, folders: Sequence[tuple[Path, float]]) -> list[tuple[SampleSet, float]]:
        return [(self.rows(folder, self._config.train.seed), weight) for folder, weight in folders]

    def eval_data(self, folders: Mapping[str, Path]) -> dict[str, SampleSet]:
        # What is evaluated on is the same for every seed, its masks too.
        return {name: self.rows(folder, 0, held_out=True) for name, folder in folders.items()}

    def starting_weights(self, model: Model) -> Fill:
        draw = make_random_fill(model, self._config.train.seed)
        if not self._config.model.from_hf:
            return draw
        folder = Path(self._config.model.from_hf).expanduser()
        read = make_hf_fill(Weights(folder, self._code), self._spec)
        lacking = set(find_missing_parameters(folder, self._spec))

        def fill(shard: Shard) -> None:
            (draw if shard.name in lacking else read)(shard)

        return fill

    def warnings(self) -> list[str]:
        """What of the model is drawn although it was to start from a folder."""
        if not self._config.model.from_hf:
            return []
        folder = Path(self._config.model.from_hf).expanduser()
        parts = find_missing_parameters(folder, self._spec)
        if not parts:
            return []
        names = ", ".join(dict.fromkeys(name.removeprefix("head.").rpartition(".")[0] or name for name in parts))
        return [f"{folder} has no head for task.kind {self._config.task.kind}; newly initialized: {names}"]

    def flops(self) -> tuple[int, int] | None:
        return flops_per_token(self._spec, self.positions) if self._masks else None

    def make_probe_samples(self, count: int) -> list[Any]:
        seq_len = self._config.data.seq_len
        tokens = np.random.default_rng(0).integers(0, self._spec.vocab_size, (count, seq_len))
        kinds, ones = np.arange(seq_len) // (seq_len // 2 + 1), np.zeros(seq_len, np.int64)
        if not self._masks:
            labels = ones if self._encoder.objective == "tags" else ones[:1]
            return [LabelledSample(row, kinds, labels, position) for position, row in enumerate(tokens)]
        places = np.arange(self.mask_form().max_predicted)
        follows = 0 if self.mask_form().pairs else IGNORE_INDEX
        return [MaskedSample(row, kinds, places, row[places], follows, position) for position, row in enumerate(tokens)]


def uses_record_files(config: "Config") -> bool:
    """Whether the prepared data are sets of records, and not of tokens."""
    return config.task.kind in ("tag", "classify") or config.data.format == "masked"


def find_missing_parameters(folder: Path, spec: ModelSpec) -> list[str]:
    """Our names of the parameters that a Hugging Face folder does not have for this task, so that they are drawn: a
    head that it lacks, and one for other labels. Raises ConfigError for a folder that lacks more."""
    found = Weights(folder, load_family_class(spec.architecture)).missing_parameters(spec)
    labels = encoder_of(spec).labels
    if labels and labels_of(read_config(folder)) != list(labels):
        found += [f"{CLASSIFIER}{kind}" for kind in ("weight", "bias") if f"{CLASSIFIER}{kind}" not in found]
    return found


def default_labels(config: "Config", found: Sequence[str]) -> tuple[list[str], str]:
    """Resolve `task.labels: auto`, with the reason; `found` are the labels of the data. Raises ConfigError where there
    are fewer than two."""
    known = None
    if config.model.from_hf:
        known = labels_of(read_config(Path(config.model.from_hf).expanduser()))
    labels = order_labels(found, known)
    if len(labels) < 2:
        raise ConfigError(
            f"the data has only the label {labels[0]!r}, so there is nothing to learn; name data with others, or "
            "set task.labels"
        )
    same = known is not None and labels == known
    return labels, "those of model.from_hf" if same else "all that the data has"
