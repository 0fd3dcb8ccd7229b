"""Tensor parallelism in scripts: with FSDP and copies, the same curve, norm, weights and checkpoints as without."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from tests.dist.scripts import example, losses
from tests.helpers import ALL, process_group, run_ranks, some

KINDS = ["llama", "neox", "gpt2"]


def made(kind: str, seed: int = 0) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig

    shape: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 32, "use_cache": False, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    configs = {
        "llama": lambda: LlamaConfig(num_key_value_heads=2, **shape),
        "neox": lambda: GPTNeoXConfig(**shape),
        "gpt2": lambda: GPT2Config(n_inner=48, **shape, **drops),
    }
    return AutoModelForCausalLM.from_config(configs[kind]())


def tokens(copy: int, step: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(10 * step + copy))


def trained(
    placement: Placement,
    settings: dict[str, Any],
    kind: str = "llama",
    how: str = "",
    original: bool = True,
    folder: str = "",
) -> list[Any]:
    """Losses of all copies and norms of two steps, and the sums of what a full state dict has on rank 0; with "save",
    of the two behind those that are saved."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm
        from torch.sagemaker.delayed_param import DelayedParamIniter
        from torch.sagemaker.distributed.fsdp import checkpoint
        from torch.sagemaker.grad_norm import clip_grad_norm_
        from torch.sagemaker.tensor_parallel.transformer import TransformerLayer, TransformerLMHead

        tsm.init(settings)
        options: dict[str, Any] = {}
        if how == "delayed" or (how == "from rank 0" and placement.rank):
            with torch.device("meta"):
                model = made(kind)
        else:
            model = made(kind, seed=placement.rank % tsm.state.tp_size if how == "unlike" else 0)
        model = tsm.transform(model, load_state_dict_from_rank0=how == "from rank 0")
        assert isinstance(model, TransformerLMHead)
        if how == "delayed":
            initer = DelayedParamIniter(model)
            options = {
                "param_init_fn": initer.get_param_init_fn(),
                "post_param_init_fn": initer.get_post_param_init_fn(),
            }
        wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
        strategy = ShardingStrategy.NO_SHARD if how == "no shard" else None
        model = FSDP(
            model, auto_wrap_policy=wrap, use_orig_params=original, sync_module_states=how == "from rank 0",
            sharding_strategy=strategy, **options,
        )  # fmt: skip
        assert len(FSDP.fsdp_modules(model)) == 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if how == "load":
            checkpoint.load_model_checkpoint(model, StateDictType.SHARDED_STATE_DICT, folder, optimizer=optimizer)
        tensor = settings.get("tensor_parallel_degree", 1)
        copies, mine = placement.world // tensor, placement.rank // tensor

        def walk() -> list[float]:
            found = []
            for step in range(2):
                rows = torch.cat([tokens(copy, step) for copy in range(4)]).chunk(copies)[mine]
                loss = model(input_ids=rows, labels=rows)["loss"]
                loss.backward()
                clip = model.clip_grad_norm_ if step else functools.partial(clip_grad_norm_, model)
                norm = float(clip(1.0))
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach() / placement.world
                torch.distributed.all_reduce(mean)
                found += [float(mean), norm]
            return found

        found = walk()
        if how == "save":
            checkpoint.save_model_checkpoint(model, StateDictType.SHARDED_STATE_DICT, folder, optimizer=optimizer)
            found = walk()
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        ):
            state = model.state_dict()
        sums = {name: [list(tensor.shape), float(tensor.double().sum())] for name, tensor in state.items()}
        return [found, sums]


def same(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=2e-5)
    assert found[1].keys() == expected[1].keys()
    for name, (shape, total) in expected[1].items():
        assert found[1][name][0] == shape
        assert found[1][name][1] == pytest.approx(total, abs=2e-3), name


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {kind: run_ranks(trained, 1, settings={}, kind=kind)[0] for kind in KINDS}


@pytest.mark.parametrize(
    ("world", "settings", "how", "original", "kind"),
    some(
        [
            (2, {"tensor_parallel_degree": 2}, "", True, "llama"),
            (4, {"tensor_parallel_degree": 2}, "", True, "gpt2"),
            (4, {"tensor_parallel_degree": 2}, "", True, "neox"),
            (4, {"tensor_parallel_degree": 2}, "", False, "llama"),
            (4, {"tensor_parallel_degree": 2}, "no shard", True, "neox"),
            (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, "", True, "llama"),
            (4, {"tensor_parallel_degree": 4}, "", True, "llama"),
            (4, {"tensor_parallel_degree": 4}, "", False, "neox"),
            (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}, "", True, "llama"),
            (4, {"tensor_parallel_degree": 2}, "from rank 0", True, "llama"),
            (4, {"tensor_parallel_degree": 2}, "from rank 0", True, "neox"),
            (4, {"tensor_parallel_degree": 2}, "unlike", True, "llama"),
        ],
        1,
        4,
        7,
        9,
        11,
    ),
)
def test_divided_tensors_train_the_same_model(
    world: int, settings: dict[str, Any], how: str, original: bool, kind: str, plain: dict[str, Any]
) -> None:
    found = run_ranks(trained, world, settings=settings, kind=kind, how=how, original=original)
    for each in found:
        assert each[0] == pytest.approx(plain[kind][0], abs=2e-5)
    same(found[0], plain[kind])
    assert found[1][1] == {}


@pytest.mark.parametrize("kind", KINDS)
def test_delayed_values_are_those_of_the_whole_model(kind: str) -> None:
    settings = {"random_seed": 3}
    expected = run_ranks(trained, 1, settings=settings, kind=kind, how="delayed")[0]
    for world in (2, 4) if ALL else (4,) if kind == "llama" else (2,):
        found = run_ranks(trained, world, settings=settings | {"tensor_parallel_degree": 2}, kind=kind, how="delayed")
        same(found[0], expected)


def test_sharded_checkpoints_of_slices_go_on(plain: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    settings = {"tensor_parallel_degree": 2}
    saved = run_ranks(trained, 4, settings=settings, how="save", folder=folder)[0]
    for world in some((4, 8, 2), 2):
        same(run_ranks(trained, world, settings=settings, how="load", folder=folder)[0], saved)
    assert saved[0] != pytest.approx(plain["llama"][0], abs=1e-3), "as from the start"
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["tp0_ep0", "tp1_ep0"]


def whole_states(placement: Placement, tensor: int, original: bool, folder: str, load: bool) -> list[float]:
    """Losses of two steps: the first from the start, after which whole states are saved; the second, or that of a fresh
    model that has loaded them."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm

        tsm.init({"tensor_parallel_degree": tensor} if tensor > 1 else {})
        inner = tsm.transform(made("llama", seed=7 if load else 0))
        if load:  # before FSDP, too
            inner.load_state_dict(torch.load(f"{folder}/model"))
        layers = {type(inner.get_submodule("model.layers.0"))}
        model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy(layers), use_orig_params=original)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rows = torch.cat([tokens(copy) for copy in range(4)])

        def step() -> float:
            loss = model(input_ids=rows, labels=rows)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())

        found = []
        alone, everywhere = (
            (FullStateDictConfig(rank0_only=only), FullOptimStateDictConfig(rank0_only=only)) for only in (True, False)
        )
        if load:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *everywhere):
                model.load_state_dict(torch.load(f"{folder}/model"))
                saved = torch.load(f"{folder}/optimizer")
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
        else:
            found.append(step())
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *alone):
                state, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *everywhere):
                again, all_moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            assert bool(state) == bool(moments.get("state")) == (placement.rank == 0)
            if placement.rank == 0:
                torch.save(state, f"{folder}/model")
                torch.save(moments, f"{folder}/optimizer")
                assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
                assert all(
                    torch.equal(value, all_moments["state"][name][kind])
                    for name, kinds in moments["state"].items()
                    for kind, value in kinds.items()
                )
            found += [float(tensor.double().sum()) for tensor in again.values()]
            found += [float(all_moments["state"][name]["exp_avg_sq"].double().sum()) for name in again]
        return [step(), *found]


@pytest.mark.parametrize("original", some([True, False], 0))
def test_whole_states_of_model_and_optimizer_are_saved_and_loaded(original: bool, tmp_path: Path) -> None:
    """By slices on four ranks, without them on one, and each of what the other has saved."""
    how: dict[str, Any] = {"original": original}
    cut, plain = tmp_path / "cut", tmp_path / "plain"
    for folder in (cut, plain):
        folder.mkdir()
    (one,) = run_ranks(whole_states, 1, tensor=1, folder=str(plain), load=False, **how)
    many = run_ranks(whole_states, 4, tensor=2, folder=str(cut), load=False, **how)
    for each in many:
        assert each == pytest.approx(one, rel=1e-4, abs=2e-3)
    for world, tensor, folder in some([(1, 1, cut), (4, 2, plain), (1, 1, plain), (4, 2, cut)], 0, 1):
        for (after,) in run_ranks(whole_states, world, tensor=tensor, folder=str(folder), load=True, **how):
            assert after == pytest.approx(one[0], rel=1e-4)


def refusal(placement: Placement, what: str) -> str:
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm

        tsm.init({"tensor_parallel_degree": 2})
        try:
            model = tsm.transform(nn.Linear(2, 2) if what == "unknown" else made("llama"))
            model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}), use_orig_params=True)
            optimizer = torch.optim.SGD(model.parameters())
            configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
                FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": []})
        except ConfigError as error:
            return str(error)
        return ""


def test_what_cannot_be_divided_or_put_together_is_refused() -> None:
    assert "tensor parallelism does not know Linear" in run_ranks(refusal, 2, what="unknown")[0]
    assert "rank0_only=False" in run_ranks(refusal, 2, what="full")[0]


def test_the_example_walks_the_curve_of_one_rank() -> None:
    alone = losses(example("plain_fsdp", 1))
    for world in (4, 8) if ALL else (2,):
        assert losses(example("tensor_parallel", world)) == pytest.approx(alone, abs=2e-5)
