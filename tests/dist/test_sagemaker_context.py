"""Context parallelism in scripts: rows that ranks share give the curve of whole rows, and of one rank."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as recompute
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from tests.helpers import process_group, run_ranks

KINDS = ["llama", "mistral", "qwen2", "qwen3", "neox"]
ROWS, LENGTH = 4, 16


def made(kind: str) -> nn.Module:
    from transformers import (
        AutoModelForCausalLM,
        GPTNeoXConfig,
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
    )

    shape: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "tie_word_embeddings": False,
    }  # fmt: skip
    configs: dict[str, Any] = {
        "llama": functools.partial(LlamaConfig, num_key_value_heads=2),
        "mistral": functools.partial(MistralConfig, num_key_value_heads=2, sliding_window=6),
        "qwen2": functools.partial(Qwen2Config, num_key_value_heads=2),
        "qwen3": functools.partial(Qwen3Config, num_key_value_heads=2, head_dim=8),
        "neox": GPTNeoXConfig,
    }
    torch.manual_seed(4)
    return AutoModelForCausalLM.from_config(configs[kind](**shape)).double()


def pieces(rows: Tensor, rank: int, size: int) -> Tensor:
    """A rank's part of rows, as public scripts cut it."""
    parts = rows.chunk(2 * size, dim=1)
    return torch.cat((parts[rank], parts[2 * size - 1 - rank]), dim=1)


def exact_loss(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """transformers' loss, which rounds to float32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def curves(
    placement: Placement, settings: dict[str, Any], kinds: list[str], by: str = "p2p", checkpointed: bool = False
) -> list[list[float]]:
    """For each kind of model, the losses of two steps, whose updates are in proportion to gradients."""
    import phalanx.compat.sagemaker  # noqa: F401

    found = []
    with process_group(placement):
        import torch.sagemaker as tsm
        from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

        tsm.init(settings)
        size, rank = tsm.state.cp_size, tsm.state.cp_rank
        groups = placement.world // size // tsm.state.tp_size
        group = placement.rank // size // tsm.state.tp_size
        for kind in kinds:
            model: Any = tsm.transform(made(kind), cp_comm_type=by)
            if size == 1:
                model.loss_function = exact_loss
            wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
            model = FSDP(model, auto_wrap_policy=wrap, use_orig_params=True)
            if checkpointed:
                recompute.apply_activation_checkpointing(
                    model, check_fn=lambda each: isinstance(each, TransformerLayer)
                )
            optimizer, told = torch.optim.SGD(model.parameters(), lr=0.5), []
            for step in range(2):
                rows = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
                labels = rows.clone()
                labels[:, 9] = -100
                places = torch.arange(LENGTH).expand(ROWS, -1) if step else None
                mine, labels = (pieces(each.chunk(groups)[group], rank, size) for each in (rows, labels))
                given = None if places is None else pieces(places.chunk(groups)[group], rank, size)
                loss = model(mine, torch.ones_like(mine), position_ids=given, labels=labels)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach() / placement.world
                torch.distributed.all_reduce(mean)
                told.append(float(mean))
            found.append(told)
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, list[float]]:
    return dict(zip(KINDS, run_ranks(curves, 1, settings={}, kinds=KINDS)[0], strict=True))


@pytest.mark.parametrize(
    ("world", "settings", "kinds", "options"),
    [
        (2, {"context_parallel_degree": 2}, KINDS, {}),
        (2, {"context_parallel_degree": 2}, ["llama", "mistral"], {"by": "all_gather", "checkpointed": True}),
        (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, ["qwen2"], {}),
        (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, ["llama", "neox"], {}),
    ],
)
def test_shared_rows_train_the_same_model(
    world: int, settings: dict[str, Any], kinds: list[str], options: dict[str, Any], alone: dict[str, list[float]]
) -> None:
    for found in run_ranks(curves, world, settings=settings, kinds=kinds, **options):
        for kind, told in zip(kinds, found, strict=True):
            assert told == pytest.approx(alone[kind], abs=1e-9, rel=0), kind


def refusal(placement: Placement, what: str) -> str:
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm

        tsm.init({"context_parallel_degree": 2})
        rows = torch.zeros((1, 5 if what == "odd" else 4), dtype=torch.int64)
        try:
            inner = nn.Linear(2, 2) if what == "unknown" else made("llama")
            if what == "dropout":
                inner.config.attention_dropout = 0.1  # type: ignore[union-attr]
            model = FSDP(inner) if what == "untouched" else tsm.transform(inner)
            mask = torch.tensor([[0, 1, 1, 1]]) if what == "mask" else None
            positions = torch.tensor([[0, 1, 0, 1]]) if what == "documents" else None
            options = {"shift_labels": rows} if what == "shifted" else {}
            model(rows, mask, positions, None, None, rows, **options)  # the fourth and fifth are None in all models
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unknown", "context parallelism does not know Linear"),
        ("dropout", "attention_dropout is 0.1; set it to 0"),
        ("odd", "got 5 positions of each row on a rank"),
        ("mask", "takes no attention_mask that hides positions"),
        ("documents", "position_ids that are not those of pieces 0 and 3 of one document"),
        ("shifted", "remove shift_labels"),
        ("untouched", "context_parallel_degree is 2, but no model was transformed"),
    ],
)
def test_what_cannot_share_rows_is_a_sentence(what: str, words: str) -> None:
    assert words in run_ranks(refusal, 2, what=what)[0]
