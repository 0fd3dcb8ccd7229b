"""Expert parallelism in scripts: with shards and copies, the same curve, norm, weights and checkpoints as without."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as recompute
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.core.placement import Placement
from tests.dist.test_sagemaker_context import exact_loss
from tests.helpers import ALL, process_group, run_ranks, some

ROWS, LENGTH, STEPS = 8, 6, 4


def made(seed: int = 0, **changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2,
    }  # fmt: skip
    model = MixtralForCausalLM(MixtralConfig(**shape | changes)).double()
    model.config._experts_implementation = "eager"
    model.loss_function = exact_loss
    return model


def transformed(settings: dict[str, Any], model: nn.Module, **options: Any) -> Any:
    import torch.sagemaker as tsm
    from torch.sagemaker.moe.moe_config import MoEConfig

    tsm.init(settings)
    return tsm.transform(model, config=MoEConfig(moe_load_balancing="none", moe_z_loss_coeff=0.0), **options)


def wrapped(model: nn.Module, by: str, **options: Any) -> Any:
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

    policies: dict[str, Any] = {
        "function": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer}),
        "policy": ModuleWrapPolicy({type(model.get_submodule("model.layers.0"))}),
        "root": None,
    }
    return FSDP(model, auto_wrap_policy=policies[by], **options)


def rows_of(step: int, placement: Placement, tensor: int = 1) -> torch.Tensor:
    """A rank's rows; tensor ranks have the same."""
    rows = torch.randint(0, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return rows.chunk(placement.world // tensor)[placement.rank // tensor]


def mean_of(loss: torch.Tensor, world: int) -> float:
    mean = loss.detach() / world
    torch.distributed.all_reduce(mean)
    return float(mean)


def trained(
    placement: Placement, settings: dict[str, Any], by: str = "function", how: str = "", original: bool = True,
    strategy: str | None = None,
) -> list[Any]:  # fmt: skip
    """Losses and norms of steps whose updates are in proportion to clipped gradients, the sums of what a full state
    dict has on rank 0, and how many elements of experts this rank holds."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        from torch.sagemaker.delayed_param import DelayedParamIniter
        from torch.sagemaker.grad_norm import clip_grad_norm_
        from torch.sagemaker.tensor_parallel.transformer import TransformerLayer

        meta = how == "delayed" or (how == "from rank 0" and placement.rank > 0)
        with torch.device("meta") if meta else contextlib.nullcontext():
            model = made()
        model = transformed(settings, model, load_state_dict_from_rank0=how == "from rank 0")
        if not meta:  # a model beside it, such as a teacher, may have the same configuration
            whole = type(model)(model.config).double()
            assert torch.isfinite(whole(input_ids=rows_of(0, placement))["logits"]).all()
        held = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
        options: dict[str, Any] = {"sync_module_states": how == "from rank 0", "use_orig_params": original}
        if how == "delayed":
            options["param_init_fn"] = DelayedParamIniter(model).get_param_init_fn()
        options["sharding_strategy"] = None if strategy is None else ShardingStrategy[strategy]
        model = wrapped(model, by, **options)
        if how == "recomputed":
            recompute.apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, TransformerLayer))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found: list[Any] = []
        for step in range(STEPS):
            rows = rows_of(step, placement, settings.get("tensor_parallel_degree", 1))
            parts = rows.chunk(2) if how == "accumulated" else [rows]
            total = torch.zeros((), dtype=torch.float64)
            for number, part in enumerate(parts):
                with model.no_sync() if number + 1 < len(parts) else contextlib.nullcontext():
                    loss = model(input_ids=part, labels=part)["loss"] / len(parts)
                    loss.backward()
                total += loss.detach()
            clip = model.clip_grad_norm_ if step % 2 else functools.partial(clip_grad_norm_, model)
            norm = float(clip(0.5, float("inf") if step == 3 else 2.0))
            optimizer.step()
            optimizer.zero_grad()
            found += [mean_of(total, placement.world), norm]
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
        ):
            state = model.state_dict()
        return [found, {name: [list(each.shape), float(each.sum())] for name, each in state.items()}, held]


def same(found: list[Any], expected: list[Any]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-9, rel=0)
    assert found[1].keys() == expected[1].keys()
    for name, (shape, total) in expected[1].items():
        assert found[1][name][0] == shape
        assert found[1][name][1] == pytest.approx(total, abs=1e-8), name


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    (found,) = run_ranks(trained, 1, settings={})
    assert found[0][1::2][:3] > [0.5] * 3, "gradients are clipped"
    return found


@pytest.mark.parametrize(
    ("world", "settings", "options"),
    some(
        [
            (2, {"expert_parallel_degree": 2}, {}),
            (4, {"tensor_parallel_degree": 2}, {"how": "from rank 0"}),
            (4, {"expert_parallel_degree": 2}, {"by": "policy", "how": "recomputed", "strategy": "SHARD_GRAD_OP"}),
            (4, {"expert_parallel_degree": 4}, {"by": "root", "how": "accumulated", "original": False}),
            (8, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, {"strategy": "_HYBRID_SHARD_ZERO2"}),
            (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 1}, {"how": "from rank 0"}),
            (4, {"expert_parallel_degree": 2}, {"strategy": "SHARD_GRAD_OP", "how": "accumulated", "original": False}),
            (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, {"by": "root", "how": "from rank 0"}),
            (4, {"expert_parallel_degree": 2}, {"strategy": "NO_SHARD", "by": "policy"}),
            (2, {"tensor_parallel_degree": 2}, {"by": "policy", "how": "recomputed"}),
            (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, {"by": "root", "how": "accumulated"}),
            (4, {"expert_parallel_degree": 4}, {"how": "recomputed"}),
            (8, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, {"by": "root", "original": False}),
        ],
        1,
        2,
        3,
        4,
    ),
)
def test_divided_experts_train_the_same_model(
    world: int, settings: dict[str, Any], options: dict[str, Any], plain: list[Any]
) -> None:
    found = run_ranks(trained, world, settings=settings, **options)
    for each in found:
        assert each[0] == pytest.approx(plain[0], abs=1e-9, rel=0)
        assert each[2] * max(settings.values()) == plain[2]
    same(found[0], plain)
    assert found[1][1] == {}


def test_delayed_values_are_those_of_the_whole_model() -> None:
    (expected,) = run_ranks(trained, 1, settings={"random_seed": 3}, how="delayed")
    for world, kind in some([(4, "expert"), (2, "tensor"), (2, "expert")], 1, 2):
        settings = {"random_seed": 3, f"{kind}_parallel_degree": 2}
        same(run_ranks(trained, world, settings=settings, how="delayed")[0], expected)


class Holder(nn.Module):
    """A script's module around the model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def clipped_in_a_holder(placement: Placement, settings: dict[str, Any]) -> list[float]:
    """The norm of the first step, and what clipping leaves of a part that FSDP ignores and the script averages."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        inner, tensor = transformed(settings, made()), settings.get("tensor_parallel_degree", 1)
        head = inner.get_submodule("lm_head")
        model, rows = FSDP(Holder(inner), ignored_modules=[head]), rows_of(0, placement, tensor)
        model(input_ids=rows, labels=rows)["loss"].backward()
        apart = [list(range(first, placement.world, tensor)) for first in range(tensor)]  # with other rows
        (gradient,) = (each.grad for each in head.parameters())
        assert gradient is not None
        torch.distributed.all_reduce(gradient, group=torch.distributed.new_subgroups_by_enumeration(apart)[0])
        gradient /= placement.world // tensor
        before = float(gradient.norm())
        return [float(model.clip_grad_norm_(0.5)), float(gradient.norm()) / before]


@pytest.mark.parametrize("kind", ["expert", "tensor"])
def test_a_norm_counts_what_is_in_other_modules_and_what_fsdp_ignores(kind: str, plain: list[Any]) -> None:
    norm = plain[0][1]
    for found in run_ranks(clipped_in_a_holder, 4, settings={f"{kind}_parallel_degree": 2}):
        assert found == pytest.approx([norm, 0.5 / norm], rel=1e-5)


# --------------------------------------------------------------------------------------------------------- checkpoints


def resumed(
    placement: Placement,
    settings: dict[str, Any],
    folder: str,
    load: str = "",
    save: bool = True,
    original: bool = True,
) -> list[float]:
    """Losses of two steps by AdamW, and the sums of its state: the first from the start, after which a script saves a
    whole state and, where there are shards, one in shards; or both of a fresh model that has loaded one of them."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        from torch.sagemaker.distributed.fsdp import checkpoint

        inner = transformed(settings, made(seed=7 if load else 0))
        if load == "inner":  # before FSDP, too
            inner.load_state_dict(torch.load(f"{folder}/model"))
        model = wrapped(inner, "policy", use_orig_params=original)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(number: int) -> float:
            rows = rows_of(number, placement, settings.get("tensor_parallel_degree", 1))
            loss = model(input_ids=rows, labels=rows)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return mean_of(loss, placement.world)

        alone, everywhere = (
            (FullStateDictConfig(rank0_only=only), FullOptimStateDictConfig(rank0_only=only)) for only in (True, False)
        )
        if load == "sharded":
            try:
                checkpoint.load_model_checkpoint(
                    model, StateDictType.SHARDED_STATE_DICT, f"{folder}/sharded", optimizer=optimizer
                )
            except CheckpointError as error:
                return [str(error)]  # type: ignore[list-item]
        elif load:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *everywhere):
                if load == "full":
                    model.load_state_dict(torch.load(f"{folder}/model"))
                saved = torch.load(f"{folder}/optimizer")
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
        else:
            step(0)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *alone):
            state, moments = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert bool(state) == bool(moments.get("state")) == (placement.rank == 0)
        sums = []
        if placement.rank == 0:
            sums += [float(tensor.sum()) for tensor in state.values()]
            sums += [float(moments["state"][name]["exp_avg_sq"].sum() * 1e3) for name in state]
            if not load:
                torch.save(state, f"{folder}/model")
                torch.save(moments, f"{folder}/optimizer")
        if save and not load and FSDP.fsdp_modules(model)[0].sharding_strategy != ShardingStrategy.NO_SHARD:
            checkpoint.save_model_checkpoint(
                model, StateDictType.SHARDED_STATE_DICT, f"{folder}/sharded", optimizer=optimizer
            )
        return [step(1), *sums]


def test_whole_and_sharded_states_go_on_with_other_degrees(tmp_path: Path) -> None:
    two: dict[str, Any] = {"expert_parallel_degree": 2}
    worlds = {"divided": 4, "copied": 2} if ALL else {"divided": 4}  # of two ranks nothing is sharded
    folders = {name: tmp_path / name for name in ("plain", *worlds)}
    for place in folders.values():
        place.mkdir()
    (expected,) = run_ranks(resumed, 1, settings={}, folder=str(folders["plain"]))
    for name, world in worlds.items():
        found = run_ranks(resumed, world, settings=two, folder=str(folders[name]))
        assert found[0] == pytest.approx(expected, abs=1e-9, rel=0)
        assert [each[0] for each in found] == pytest.approx([expected[0]] * len(found), abs=1e-9, rel=0)
    names = sorted(path.name for path in (folders["divided"] / "sharded").iterdir())
    assert names == ["tp0_ep0", "tp0_ep1"]
    others = [
        (1, "expert", 1, "divided", "full", True),
        (4, "expert", 4, "divided", "full", False),
        (2, "expert", 2, "plain", "inner", True),
        (4, "expert", 2, "copied", "full", True),
        (8, "expert", 2, "divided", "sharded", True),
        (2, "tensor", 2, "divided", "full", True),
        (4, "expert", 2, "divided", "sharded", True),
    ]
    for world, kind, degree, folder, load, original in some(others, 1, 2, 5, 6):
        settings = {f"{kind}_parallel_degree": degree}
        found = run_ranks(resumed, world, settings=settings, folder=str(folders[folder]), load=load, original=original)
        assert found[0] == pytest.approx(expected, abs=1e-9, rel=0), (world, kind, degree, folder, load)
        assert [each[0] for each in found] == pytest.approx([expected[0]] * world, abs=1e-9, rel=0)
    other = {"hybrid_shard_degree": 2}
    for told in run_ranks(resumed, 4, settings=other, folder=str(folders["divided"]), load="sharded"):
        assert "with the tensor and expert parallel degrees that it was saved with" in str(told[0])


def local(placement: Placement, settings: dict[str, Any], folder: str, ways: list[bool]) -> list[Any]:
    """The loss of a second step, after a first whose local state is saved, or from there; or why it is not."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        from torch.sagemaker import state
        from torch.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver, state_dict_utils

        def done(save: bool) -> Any:
            model = wrapped(transformed(settings, made(seed=0 if save else 7)), "policy", use_orig_params=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            groups = state.ranker.get_rep_groups()
            mine, _ = torch.distributed.new_subgroups_by_enumeration(groups)
            given = {"checkpoint_id": f"{folder}/{state.ep_rank} of {model.rank}", "process_group": mine}

            def step(number: int) -> float:
                rows = rows_of(number, placement)
                loss = model(input_ids=rows, labels=rows)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return mean_of(loss, placement.world)

            if save:
                step(0)
            else:
                state_dict_utils.init_optim_state(optimizer, skip_empty_param=True)
            with state_dict_utils.sm_state_dict_type(model, state_dict_utils.SMStateDictType.SM_LOCAL_STATE_DICT):
                held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            try:
                (state_dict_saver.save if save else state_dict_loader.load)(held, **given)
                return step(1)
            except CheckpointError as error:
                return str(error)

        found = [done(save) for save in ways]
        torch.distributed.barrier()
        return found


def test_a_local_state_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    two = {"expert_parallel_degree": 2}
    for saved, loaded in run_ranks(local, 4, settings=two, folder=str(tmp_path), ways=[True, False]):
        assert loaded == saved
    four = {"expert_parallel_degree": 4}
    for rank, (told,) in enumerate(run_ranks(local, 4, settings=four, folder=str(tmp_path), ways=[False])):
        words = (
            "is (800,) in the checkpoint and (50, 16) here;",
            "does not exist, so no checkpoint was completed there;",
        )
        assert words[rank > 1] in told and "shards, too" in told and "metadata is None" not in told


# ------------------------------------------------------------------------------------------------------------- refused


def refusal(placement: Placement, what: str) -> str:
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm
        from torch.sagemaker.moe.moe_config import MoEConfig

        tsm.init({"expert_parallel_degree": 2})
        ranks = [tsm.state.ep_rank, tsm.state.ep_size, tsm.state.ranker.get_ep_groups()]
        assert ranks == [placement.rank, 2, [[0, 1]]]
        assert torch.distributed.get_process_group_ranks(tsm.state.ep_process_group) == [0, 1]
        cases: dict[str, dict[str, Any]] = {"odd": {"num_local_experts": 3}, "jitter": {"router_jitter_noise": 0.1}}
        try:
            model: Any = nn.Linear(2, 2) if what == "unknown" else made(**cases.get(what, {}))
            if what == "untouched":
                FSDP(model)
            config = None if what == "config" else MoEConfig(smp_moe=what != "smp", moe_load_balancing="none")
            model = tsm.transform(model, config=config)
            if what == "fully_shard":
                fully_shard(model)
            rows = rows_of(0, placement)
            model(input_ids=rows, labels=rows)["loss"].backward()
            torch.optim.SGD(model.parameters()).step()
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("unknown", "expert parallelism does not know Linear"),
        ("odd", "must divide the 3 experts of a layer"),
        ("jitter", "router_jitter_noise is 0.1; set it to 0"),
        ("config", "got no MoEConfig with smp_moe=True"),
        ("smp", "got no MoEConfig with smp_moe=True"),
        ("untouched", "expert_parallel_degree is 2, but no model was transformed"),
        ("fully_shard", "wrap the model in FullyShardedDataParallel"),
        ("unwrapped", "no model is wrapped in FSDP"),
    ],
)
def test_what_cannot_divide_experts_is_a_sentence(what: str, words: str) -> None:
    assert words in run_ranks(refusal, 2, what=what)[0]
