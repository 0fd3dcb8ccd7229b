"""Entity linking as a custom task: a pre-trained BERT tags the mentions of a text, and finds the entity of each mention
by the vector that is nearest to its own.

A file has a word with its tag and its entity (`-`: none) in a line, and an empty line behind each sentence:

    Paris B-LOC Paris
    is O -

`bert` is a Hugging Face folder, `vectors` a .npy file of an entity in each row, `entities` a text with their names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import phalanx
from phalanx import errors

IGNORED = -100  # of labels that count for nothing


class Net(phalanx.Model):
    """Tokens (B, S) -> logits of tags (B, S, tags), and cosines of the words at `places` with all entities."""

    def __init__(self, folder: Path, tags: Sequence[str], vectors: np.ndarray) -> None:
        super().__init__()
        config = transformers.BertConfig.from_pretrained(
            folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.tag, self.link = (nn.Linear(config.hidden_size, width) for width in (len(tags), vectors.shape[1]))
        self.pretrained, self.values = load_file(folder / "model.safetensors"), vectors
        self.register_buffer("vectors", torch.empty(vectors.shape), persistent=False)

    def start(self, name: str, shape: tuple[int, ...]) -> Any:
        if not name.startswith("bert."):
            return super().start(name, shape)
        known = self.pretrained.get(name, self.pretrained.get(name.removeprefix("bert.")))
        if known is None or known.shape != shape:
            raise errors.DataError(
                f"the folder of the BERT has no {name} of the shape {shape}; give that of another one"
            )
        return "read", lambda first, last: known.flatten()[first:last]

    def constant(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "vectors":
            return F.normalize(torch.from_numpy(self.values).float(), dim=-1)
        return torch.arange(shape[1])[None] if name.endswith("position_ids") else torch.zeros(shape)

    def forward(self, tokens: Tensor, lengths: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        hidden = self.bert(tokens, attention_mask=there).last_hidden_state
        own = self.link(hidden).flatten(0, 1)[places]
        own = F.normalize(own.to(torch.promote_types(own.dtype, torch.float32)), dim=-1)
        return self.tag(hidden), own @ self.vectors.to(own.dtype).T


class Task(phalanx.Task):
    """A word has a loss of its tag; the first of a mention with a known entity has that of its vector as well."""

    def __init__(self, bert: str, files: Sequence[str], vectors: str, entities: str, held_out: Sequence[str] = ()):
        self.folder, self.files, self.asked = Path(bert), files, held_out
        self.names = {name: at for at, name in enumerate(Path(entities).read_text("utf-8").splitlines())}
        self.vectors = np.load(vectors, allow_pickle=False)
        if self.vectors.ndim != 2 or len(self.vectors) != len(self.names):
            raise errors.DataError(
                f"{vectors} has the shape {self.vectors.shape}, but {entities} has {len(self.names)} names"
            )
        self.backend = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.longest = int(transformers.BertConfig.from_pretrained(self.folder).max_position_embeddings)
        self.tags = sorted({tag for file in files for sentence in self.read(file) for _, tag, _ in sentence})

    def read(self, file: str) -> list[list[list[str]]]:
        text = Path(file).read_text("utf-8").strip().replace("\r\n", "\n")
        sentences = [[line.split() for line in part.splitlines()] for part in text.split("\n\n") if part.strip()]
        if wrong := [line for sentence in sentences for line in sentence if len(line) != 3]:
            raise errors.DataError(
                f"{file} has the line {' '.join(wrong[0])!r}, which is no word, tag and entity; mend it"
            )
        return sentences

    def rows(self, files: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each sentence the tokens; and for each its tag and entity, or IGNORED."""
        known, found = {tag: at for at, tag in enumerate(self.tags)}, []
        for sentence in (sentence for file in files for sentence in self.read(file)):
            row = [(self.backend.token_to_id("[CLS]"), IGNORED, IGNORED)]
            for word, tag, entity in sentence:
                ids = self.backend.encode(word, add_special_tokens=False).ids or [self.backend.token_to_id("[UNK]")]
                linked = self.names.get(entity, IGNORED) if tag.startswith(("B", "S")) else IGNORED
                row += [(ids[0], known[tag], linked), *((more, IGNORED, IGNORED) for more in ids[1:])]
            row = [*row[: self.longest - 1], (self.backend.token_to_id("[SEP]"), IGNORED, IGNORED)]
            found.append(tuple(np.array(row, np.int64).T))
        return found

    def model(self) -> phalanx.Model:
        return Net(self.folder, self.tags, self.vectors)

    def train(self) -> Any:
        return self.rows(self.files)

    def held_out(self) -> Any:
        return self.rows(self.asked) if self.asked else None

    def collate(self, samples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> phalanx.Batch:
        tokens, tags, entities = (
            pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_value=filler)
            for rows, filler in zip(zip(*samples, strict=True), (0, IGNORED, IGNORED), strict=True)
        )
        places = (entities.flatten() != IGNORED).nonzero()[:, 0]
        inputs = {"tokens": tokens, "lengths": torch.tensor([len(row) for row, _, _ in samples]), "tags": tags,
                  "places": places, "entities": entities.flatten()[places]}  # fmt: skip
        return phalanx.Batch(inputs, int((tags != IGNORED).sum()))

    def outputs(self, model: nn.Module, batch: phalanx.Batch) -> Any:
        return model(*(batch.inputs[name] for name in ("tokens", "lengths", "places")))

    def loss_sum(self, model: nn.Module, batch: phalanx.Batch, draws: phalanx.CounterRNG | None) -> Tensor:
        logits, cosines = self.outputs(model, batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.inputs["tags"].flatten(), reduction="sum")
        return loss + (1 - cosines.gather(1, batch.inputs["entities"][:, None])).sum()

    def counts(self, model: nn.Module, batch: phalanx.Batch) -> dict[str, Tensor]:
        logits, cosines = self.outputs(model, batch)
        asked, right = batch.inputs["tags"] != IGNORED, logits.argmax(-1) == batch.inputs["tags"]
        linked = cosines.argmax(-1) == batch.inputs["entities"]
        sums = {"words": asked.sum(), "tagged": (asked & right).sum(), "linked": linked.sum()}
        return sums | {"mentions": torch.tensor(linked.numel())}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        return {"accuracy": counts["tagged"] / max(counts["words"], 1.0),
                "entity_accuracy": counts["linked"] / max(counts["mentions"], 1.0)}  # fmt: skip
