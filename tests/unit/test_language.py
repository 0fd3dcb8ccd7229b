"""Next-token batches: what is shifted, what is counted, and that nothing counts twice or not at all."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from phalanx.tasks.language import IGNORE_INDEX, CausalLMTask
from phalanx.tasks.task import Task

SEQ_LEN = 6
VOCAB = 11


@dataclass
class Sample:
    tokens: NDArray[np.int64]
    position: int
    learnt: NDArray[np.bool_] | None = None
    lengths: NDArray[np.int64] | None = None


class Bigram(nn.Module):
    """The smallest model with a loss of its own: logits are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor, labels: Tensor, draws: None = None) -> Tensor:
        logits = self.table[tokens].flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def samples(count: int) -> list[Sample]:
    random = np.random.default_rng(count)
    return [Sample(random.integers(0, VOCAB, SEQ_LEN + 1), 100 + i) for i in range(count)]


def test_labels_are_the_next_tokens() -> None:
    given = samples(3)
    batch = CausalLMTask(SEQ_LEN).collate(given)
    tokens, labels = batch.inputs["tokens"], batch.inputs["labels"]
    assert tokens.shape == labels.shape == (3, SEQ_LEN)
    assert tokens.dtype == labels.dtype == batch.samples.dtype == torch.int64
    assert tokens.is_contiguous()
    assert labels.is_contiguous()
    for row, sample in enumerate(given):
        assert tokens[row].tolist() == sample.tokens[:-1].tolist()
        assert labels[row].tolist() == sample.tokens[1:].tolist()
    assert batch.samples.tolist() == [100, 101, 102]
    assert batch.weight == 3 * SEQ_LEN


def test_ignored_labels_weigh_nothing() -> None:
    sample = samples(1)[0]
    sample.tokens[-2:] = IGNORE_INDEX
    assert CausalLMTask(SEQ_LEN).collate([sample]).weight == SEQ_LEN - 2


def test_no_samples_make_a_batch_that_runs_and_changes_nothing() -> None:
    task, model = CausalLMTask(SEQ_LEN), Bigram()
    batch = task.collate([])
    assert batch.weight == 0
    assert batch.inputs["tokens"].shape == (1, SEQ_LEN)
    assert (batch.inputs["labels"] == IGNORE_INDEX).all()
    assert batch.samples.tolist() == [0]
    loss = task.loss_sum(model, batch, None)
    loss.backward()
    assert loss.item() == 0.0
    assert model.table.grad is not None
    assert not model.table.grad.any()


def test_loss_sums_of_parts_add_up_to_the_whole() -> None:
    task, model, given = CausalLMTask(SEQ_LEN), Bigram(), samples(5)
    whole = task.loss_sum(model, task.collate(given), None)
    parts = [task.collate(part) for part in (given[:3], [], given[3:])]
    total = sum(task.loss_sum(model, part, None) for part in parts)
    torch.testing.assert_close(total, whole, rtol=1e-14, atol=0)
    assert sum(part.weight for part in parts) == task.nominal_weight(5) == 5 * SEQ_LEN
    by_hand = -sum(
        torch.log_softmax(model.table[int(s.tokens[i])], -1)[int(s.tokens[i + 1])]
        for s in given
        for i in range(SEQ_LEN)
    )
    torch.testing.assert_close(whole, by_hand, rtol=1e-12, atol=0)


def test_moving_a_batch_moves_all_of_it_and_keeps_its_weight() -> None:
    task: Task = CausalLMTask(SEQ_LEN)
    batch = task.collate(samples(2))
    moved = batch.to("meta")
    assert {tensor.device.type for tensor in [*moved.inputs.values(), moved.samples]} == {"meta"}
    assert moved.weight == batch.weight
    assert batch.inputs["tokens"].device.type == "cpu"


def test_samples_of_another_length_are_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="7 tokens for sequences of 5"):
        CausalLMTask(5).collate(samples(1))


def test_labels_that_are_not_learnt_count_for_nothing() -> None:
    one, other = samples(2)
    one.learnt = np.array([True, False, False, True, True, False])
    batch = CausalLMTask(SEQ_LEN).collate([one, other])
    assert batch.weight == 3 + SEQ_LEN
    expected = np.where(one.learnt, one.tokens[1:], IGNORE_INDEX)
    assert batch.inputs["labels"].tolist() == [expected.tolist(), other.tokens[1:].tolist()]
    assert batch.inputs["tokens"][0].tolist() == one.tokens[:-1].tolist()
    alone = CausalLMTask(SEQ_LEN).collate([one]).inputs
    assert alone["labels"].tolist() == [expected.tolist()]
    assert alone["tokens"].tolist() == [one.tokens[:-1].tolist()]


def test_documents_of_a_row_are_told_by_segments_and_positions() -> None:
    one, other = samples(2)
    one.lengths, other.lengths = np.array([2, 3, 1]), np.array([4, 2])
    task = CausalLMTask(SEQ_LEN, isolated=True)
    inputs = task.collate([one, other]).inputs
    assert inputs["positions"].tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]]
    assert inputs["segments"].tolist() == [0, 2, 5, 6, 10, 12, 12, 12, 12]  # five of them, made eight
    assert inputs["segments"].dtype == torch.int32
    assert inputs["positions"].dtype == torch.int64
    four = task.collate([other, other]).inputs["segments"].tolist()
    assert four == [0, 4, 6, 10, 12]
    # A row that is one document, and no row at all, look alike to the model.
    assert task.collate(samples(1)).inputs["segments"].tolist() == [0, SEQ_LEN]
    nothing = task.collate([])
    assert nothing.weight == 0
    assert nothing.inputs["segments"].tolist() == [0, SEQ_LEN]
    assert set(CausalLMTask(SEQ_LEN).collate([]).inputs) == {"tokens", "labels"}


def test_rows_of_documents_need_a_task_that_isolates_them() -> None:
    [sample] = samples(1)
    sample.lengths = np.array([4, 2])
    with pytest.raises(AssertionError, match="knows of none"):
        CausalLMTask(SEQ_LEN).collate([sample])
