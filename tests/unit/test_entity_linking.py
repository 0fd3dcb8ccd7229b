"""The example of entity linking: rows of its files, a pre-trained start, losses that are sums, and its scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.config import load
from phalanx.core.errors import DataError
from phalanx.models.model import draw_init_slice
from phalanx.workload.custom import CustomWorkload
from phalanx.workload.custom_checks import check_custom_task
from tests.helpers import ROOT

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "in", "france", "##s")


def test_mentions_are_linked_by_a_pretrained_bert(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    bert: Any = transformers.BertForMaskedLM(config)
    bert.save_pretrained(tmp_path / "bert")
    backend = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "bert" / "tokenizer.json"))
    np.save(tmp_path / "vectors.npy", np.eye(3, 8, dtype=np.float32))
    (tmp_path / "names.txt").write_text("Berlin\nParis\nFrance\n")
    sentence = "paris B-LOC Paris\nis O -\nin O -\nfrances B-LOC France\n"
    (tmp_path / "a.txt").write_text(sentence + "\n" + "is O -\n\n" + sentence + "\nparis B-LOC Unknown\n")
    options = {"bert": str(tmp_path / "bert"), "files": [str(tmp_path / "a.txt")],
               "vectors": str(tmp_path / "vectors.npy"), "entities": str(tmp_path / "names.txt")}  # fmt: skip
    tree = {
        "task": {"code": str(ROOT / "examples" / "entity_linking.py"), "options": options},
        "train": {"global_batch": 4, "micro_batch": 2},
    }
    recipe = load.build_config(tree, "here")
    workload = CustomWorkload(recipe)
    assert check_custom_task(workload, recipe) > 0
    task: Any = workload.user_task
    tokens, tags, entities = task.train()[0]
    assert tokens.tolist() == [2, 5, 6, 7, 8, 9, 3] and tags.tolist() == [-100, 0, 1, 1, 0, -100, -100]
    assert entities.tolist() == [-100, 1, -100, -100, 2, -100, -100]

    model: Any = workload.model()
    name, theirs = (
        "bert.encoder.layer.0.intermediate.dense.weight",
        bert.bert.encoder.layer[0].intermediate.dense.weight,
    )
    start = model.start(name, tuple(theirs.shape))
    assert torch.equal(draw_init_slice(start, 0, name, 5, 40, "cpu", torch.float32), theirs.flatten()[5:40])
    torch.manual_seed(0)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        buffer.copy_(model.constant(name, tuple(buffer.shape)))
    whole = task.collate(task.train())
    assert whole.weight == 10 and whole.inputs["entities"].tolist() == [1, 2, 1, 2]
    parts = [task.collate([sample]) for sample in task.train()]
    alone = sum(task.loss_sum(model, part, None) for part in parts)
    assert torch.allclose(task.loss_sum(model, whole, None), alone, rtol=1e-5)
    assert set(task.scores({key: float(value) for key, value in task.counts(model, whole).items()})) == {
        "accuracy", "entity_accuracy",
    }  # fmt: skip

    (tmp_path / "a.txt").write_text("paris B-LOC\n")
    with pytest.raises(DataError, match=r"a.txt has the line 'paris B-LOC', which is no word, tag and entity"):
        task.train()
