"""Each key has an effect that can be seen; what is asked for and not in effect is an error."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from tests.dist.scripts import run_script, written
from tests.helpers import process_group, run_ranks, some


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Four blocks of 4160 parameters each, and 3 x 64 beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(64, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(model: nn.Module, **options: Any) -> FSDP:
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def data(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


# ------------------------------------------------------------------------------------------------- hybrid_shard_degree


def held(placement: Placement, settings: dict[str, Any], strategy: str | None = None) -> dict[str, Any]:
    """Over which ranks a model is sharded, how many elements this rank holds, and what a step gives."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm

        tsm.init(settings)
        model = wrapped(net(), sharding_strategy=None if strategy is None else ShardingStrategy[strategy])
        count = sum(parameter.numel() for parameter in model.parameters())
        model(data(placement.rank)).square().sum().backward()
        norm = float(model.clip_grad_norm_(1e9))
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        group = tsm.state.rep_rank_process_group
        hybrid = "HYBRID" in model.sharding_strategy.name
        copies = dist.get_process_group_ranks(model._inter_node_pg) if hybrid else None
        return {
            "shard": dist.get_process_group_ranks(model.process_group),
            "strategy": model.sharding_strategy.name,
            "inner": sorted({each.sharding_strategy.name for each in FSDP.fsdp_modules(model)}),
            "copies": copies,
            "elements": count,
            "norm": norm,
            "replica": None if group is None else dist.get_process_group_ranks(group),
            "rep_rank": tsm.state.ranker.get_rep_rank(placement.rank),
        }  # fmt: skip


ALL = sum(parameter.numel() for parameter in Net().parameters())


@pytest.mark.parametrize(
    ("settings", "strategy", "shard", "name"),
    some(
        [
            ({}, None, 4, "FULL_SHARD"),
            ({"hybrid_shard_degree": 0}, "SHARD_GRAD_OP", 4, "SHARD_GRAD_OP"),
            ({"hybrid_shard_degree": 0}, "HYBRID_SHARD", 4, "HYBRID_SHARD"),
            ({"hybrid_shard_degree": 1}, None, 1, "NO_SHARD"),
            ({"hybrid_shard_degree": 2}, None, 2, "HYBRID_SHARD"),
            ({"hybrid_shard_degree": 2}, "FULL_SHARD", 2, "HYBRID_SHARD"),
            ({"hybrid_shard_degree": 2}, "_HYBRID_SHARD_ZERO2", 2, "_HYBRID_SHARD_ZERO2"),
            ({"hybrid_shard_degree": 4}, "SHARD_GRAD_OP", 4, "HYBRID_SHARD"),
        ],
        0,
        2,
        3,
        4,
        6,
    ),
)
def test_the_degree_of_sharding_and_a_gradient_as_of_one_process(
    settings: dict[str, int], strategy: str | None, shard: int, name: str
) -> None:
    plain = net()
    sum(plain(data(rank)).square().sum() / 4 for rank in range(4)).backward()  # FSDP takes the mean
    norm = nn.utils.get_total_norm(parameter.grad for parameter in plain.parameters())
    for rank, each in enumerate(run_ranks(held, 4, settings=settings, strategy=strategy)):
        assert each["strategy"] == name
        assert each["inner"] == [name]
        assert each["norm"] == pytest.approx(float(norm), rel=1e-5)
        assert ALL / shard <= each["elements"] <= ALL / shard + 5 * 4, "each part is padded"
        assert len(each["shard"]) == (4 if name == "NO_SHARD" else shard)
        if name != "NO_SHARD":
            first = rank // shard * shard
            assert each["shard"] == list(range(first, first + shard))
        if "HYBRID" in name:
            assert each["copies"] == list(range(rank % shard, 4, shard))
        native = settings.get("hybrid_shard_degree", 0) < 2
        assert each["replica"] == (None if native else each["shard"])
        assert each["rep_rank"] == rank // shard


# ---------------------------------------------------------------------------------------------------------- offloading


def moved(placement: Placement, settings: dict[str, Any], offloaded: bool = True) -> list[Any]:
    """Bytes that left the device in a forward pass, and all gradients as bits."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        offload_wrapper,
    )

    import phalanx.compat.sagemaker  # noqa: F401
    from phalanx.compat.sagemaker import small

    with process_group(placement), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.sagemaker as tsm

        tsm.init(settings)
        model: Any = wrapped(net())
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        if offloaded:
            model = offload_wrapper(model)
        for step in range(2):
            model.zero_grad()
            model(data(placement.rank + step) * 1.0).square().sum().backward()
        bits = [parameter.grad.view(torch.int32).tolist() for parameter in model.parameters()]
        mover = model.__dict__.get(small.MOVER)
        return [None if mover is None else [mover.horizon, mover.out_bytes, mover.back_bytes], bits]


def test_the_horizon_says_how_much_leaves_and_gradients_are_the_same_bits() -> None:
    _, plain = run_ranks(moved, 2, settings={}, offloaded=False)[0]
    native, bits = run_ranks(moved, 2, settings={"sm_activation_offloading": False})[0]
    assert native is None, "PyTorch's own way"
    assert bits == plain
    one = 4 * 64 * 4  # bytes of a block's input
    on = {"sm_activation_offloading": True}
    for settings, horizon in ((on | {"activation_loading_horizon": 1}, 1), ({}, 2)):  # 2 and offloading by default
        counted, bits = run_ranks(moved, 2, settings=settings)[0]
        # The first block's input is the data, which needs no gradient and does not leave.
        assert counted[0] == horizon
        assert counted[1] == 2 * (3 - horizon) * one, "in two passes"
        assert counted[1] == counted[2]
        assert bits == plain


# ----------------------------------------------------------------------------------------- warnings, empty shards, seed


def flushed(placement: Placement, settings: dict[str, Any]) -> list[str]:
    """Warnings of three steps, in the second of which the allocator flushes twice."""
    import phalanx.compat.sagemaker  # noqa: F401
    from phalanx.system import accelerator

    counts = iter([5, 5, 7, 7])
    accelerator.cache_flushes = lambda device: next(counts)
    with process_group(placement), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch.sagemaker as tsm

        tsm.init(settings)
        model = wrapped(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(data(0)).sum().backward()
            optimizer.step()
        return [str(each.message) for each in caught if "cache flushes" in str(each.message)]


def test_flushes_of_the_allocator_are_warned_of() -> None:
    for found in run_ranks(flushed, 2, settings={}):
        assert len(found) == 1
        assert "2 cache flushes of the memory allocator since the last step" in found[0]
    assert run_ranks(flushed, 2, settings={"fsdp_cache_flush_warnings": False}) == [[], []]


def shards(placement: Placement, settings: dict[str, Any], folder: str) -> list[Any]:
    """How many rows of the last layer's three each of four ranks has a shard of; and whether they can be saved."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import save

        tsm.init(settings)
        model = wrapped(net())
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict()}
            rows = [shard.tensor.shape[0] for shard in state["model"]["last.weight"].local_shards()]
            save(state, checkpoint_id=folder)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            state = {"model": model.state_dict()}
            load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
        same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        return [rows, same]


def test_a_rank_without_rows_holds_no_shard_or_an_empty_one(tmp_path: Path) -> None:
    by_default = run_ranks(shards, 4, settings={}, folder=str(tmp_path / "a"))
    assert by_default == [[[1], True], [[1], True], [[1], True], [[], True]]
    allowed = run_ranks(shards, 4, settings={"allow_empty_shards": True}, folder=str(tmp_path / "b"))
    assert allowed == [[[1], True], [[1], True], [[1], True], [[0], True]]


def drawn(placement: Placement, settings: dict[str, Any], seed: int = 0) -> list[float]:
    """Whole weights of a model with delayed initialisation."""
    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm
        from torch.sagemaker.delayed_param import DelayedParamIniter

        tsm.init(settings)
        torch.manual_seed(seed)
        with torch.device("meta"):
            model = Net()
        initer = DelayedParamIniter(model)
        with initer.validate_params_and_buffers_inited():
            parallel = wrapped(model, param_init_fn=initer.get_param_init_fn(), use_orig_params=True)
        with FSDP.summon_full_params(parallel):
            return [float(parameter.double().sum()) for parameter in parallel.parameters()]


def test_the_seed_alone_decides_delayed_weights() -> None:
    seven = run_ranks(drawn, 3, settings={"random_seed": 7})[0]
    assert len(set(seven)) == len(seven), "no two layers are alike"
    assert run_ranks(drawn, 2, settings={"random_seed": 7, "hybrid_shard_degree": 2}, seed=3)[0] == seven
    assert run_ranks(drawn, 2, settings={"tensor_parallel_seed": 7})[0] == seven
    assert run_ranks(drawn, 1, settings={"random_seed": 8})[0] != seven
    unset = run_ranks(drawn, 1, settings={}, seed=3)[0]
    assert unset not in (seven, run_ranks(drawn, 1, settings={}, seed=4)[0]), "then torch's own seed does"
    assert unset == run_ranks(drawn, 2, settings={}, seed=3)[0]


# --------------------------------------------------------------------------------------------- asked for, not in effect


def refusal(placement: Placement, settings: dict[str, Any], what: str) -> str:
    """The sentence with which something is refused, or ""."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement):
        import torch.sagemaker as tsm

        model: nn.Module = net()
        try:
            tsm.init(settings)
            if what == "group":
                group = dist.new_group([0, 1])
                dist.barrier()  # or the first rank refused closes the connections that the other still makes
                wrapped(model, process_group=group)
            if what == "from rank 0":
                tsm.transform(model, load_state_dict_from_rank0=True)
                wrapped(model)
            if what == "experts":
                from torch.sagemaker.moe.moe_config import MoEConfig

                tsm.transform(model, config=MoEConfig())
            if what == "config":
                tsm.transform(model, config={"a": 1})
            if what == "again":
                tsm.init({"hybrid_shard_degree": 2})
            if what in ("wrap", "offload"):
                model = wrapped(model)
            if what == "offload":
                model = offload_wrapper(model)
            model(data(0)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("settings", "what", "says"),
    [
        ({"tensor_parallel_degree": 2}, "wrap", "tensor_parallel_degree is 2, but no model was transformed"),
        ({"tensor_parallel_degree": 2}, "", "tensor_parallel_degree is 2, but no model was transformed"),
        ({"hybrid_shard_degree": 2}, "", "hybrid_shard_degree is 2, but no model is wrapped in FSDP"),
        ({"hybrid_shard_degree": 2}, "group", "leave out one of them"),
        ({"sm_activation_offloading": True}, "wrap", "the script does not call offload_wrapper"),
        ({}, "offload", "without activation checkpointing"),
        ({}, "from rank 0", "give FSDP sync_module_states=True"),
        ({}, "experts", "Net has no experts, so it would have no effect"),
        ({}, "config", "remove it"),
        ({}, "again", "called before with other settings"),
        ({"expert_parallel_degree": 2}, "", "expert_parallel_degree is 2, but no model was transformed"),
        ({"context_parallel_degree": 2}, "", "context_parallel_degree is 2, but no model was transformed"),
        ({}, "wrap", ""),
        ({"sm_activation_offloading": False}, "wrap", ""),
        ({"activation_loading_horizon": 3}, "wrap", ""),
    ],
)
def test_what_is_asked_for_and_not_in_effect_is_refused(settings: dict[str, Any], what: str, says: str) -> None:
    for told in run_ranks(refusal, 2, settings=settings, what=what):
        assert says in told
        assert bool(told) == bool(says)


def balanced(placement: Placement, asked: dict[str, Any], settings: dict[str, Any] | None = None) -> list[Any]:
    """What a small Mixtral's loss is more than its language model's, its auxiliary loss, what was said, and the seed of
    delayed initialisation."""
    from transformers import MixtralConfig, MixtralForCausalLM

    import phalanx.compat.sagemaker  # noqa: F401

    with process_group(placement), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch.sagemaker as tsm
        from torch.sagemaker.delayed_param import DelayedParamIniter
        from torch.sagemaker.moe.moe_config import MoEConfig

        tsm.init({"random_seed": 7} if settings is None else settings)
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
        torch.manual_seed(0)
        model: Any = MixtralForCausalLM(
            MixtralConfig(vocab_size=20, num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2, **shape)
        )
        tokens = torch.arange(16).view(2, 8)
        plain = model(input_ids=tokens, labels=tokens).loss
        try:
            model = tsm.transform(model, config=MoEConfig(**asked))
        except ConfigError as error:
            return [str(error)]
        found = model(input_ids=tokens, labels=tokens)
        more = None if found.aux_loss is None else float(found.aux_loss.detach())
        said = [str(each.message) for each in caught if "MoEConfig" in str(each.message)]
        return [float((found.loss - plain).detach()), more, said, DelayedParamIniter(model)._seed]


def test_experts_that_are_not_divided_are_balanced_by_the_models_own_code() -> None:
    ((more, auxiliary, said, seed),) = run_ranks(
        balanced, 1, asked={"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.0}
    )
    assert auxiliary > 0
    assert more == pytest.approx(0.5 * auxiliary, rel=1e-4)
    assert (said, seed) == ([], 7)
    plain: dict[str, Any] = {"moe_load_balancing": "none", "moe_z_loss_coeff": 0.0, "use_cpu_initialization": True}
    for asked in (plain, {"smp_moe": False}, {}):
        ((more, auxiliary, said, seed),) = run_ranks(balanced, 1, asked={**asked, "random_seed": 9}, settings={})
        assert (more, auxiliary, seed == 9) == (0.0, None, asked != {"smp_moe": False})
        told = [word for word in ("sinkhorn", "moe_z_loss_coeff=0.001 by default") if any(word in one for one in said)]
        assert len(told) == len(said) == 2 * (asked == {}), "of the defaults alone"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"moe_load_balancing": "balanced"}, "moe_load_balancing='balanced', which is not supported"),
        ({"global_token_shuffle": True}, "global_token_shuffle=True, which has no effect"),
        ({"moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff=0.1, which has no effect"),
        ({"moe_all_to_all_dispatcher": False}, "moe_all_to_all_dispatcher=False, which has no effect"),
        ({"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff=0.1, which has no effect"),
        ({"random_seed": 8}, "random_seed=8, and tsm.init was given random_seed=7"),
    ],
)
def test_what_would_balance_experts_and_does_not_is_refused(asked: dict[str, Any], says: str) -> None:
    ((told,),) = run_ranks(balanced, 1, asked=asked)
    assert says in told


# ------------------------------------------------------------------------------------------------------- init and state

STATE = """
import json
import torch.sagemaker as tsm
import torch.distributed as dist
assert not tsm.is_initialized()
tsm.init({config})
assert tsm.is_initialized() and dist.is_initialized()
s = tsm.state
group = lambda g: None if g is None else dist.get_process_group_ranks(g)
dist.barrier()  # a rank that ends breaks what others still connect
print(json.dumps({{
    "rank": s.rank, "world_size": s.world_size, "hybrid": s.hybrid_shard_degree, "tp": s.tensor_parallel_degree,
    "tp_size": s.tp_size, "tp_rank": s.tp_rank, "ep": [s.ep_rank, s.ep_size], "tp_group": group(s.tp_process_group),
    "rep_group": group(s.rep_rank_process_group), "rep": s.ranker.get_rep_groups(),
    "rep_rank": s.ranker.get_rep_rank(s.rank), "off": s.sm_activation_offloading, "seed": s.random_seed,
}}))
"""


def states(tmp_path: Path, config: str, settings: str | None = None, world: int = 4) -> list[Any]:
    script = written(tmp_path, STATE.format(config=config))
    printed = run_ranks(run_script, world, script=script, arguments=[], settings=settings)
    return [json.loads(each) for each in printed]


def test_the_state_of_hybrid_sharding(tmp_path: Path) -> None:
    file = tmp_path / "smp.json"
    file.write_text('{"hybrid_shard_degree": 2, "sm_activation_offloading": false}')
    for config in (f'"{file}"', "{'hybrid_shard_degree': 2, 'sm_activation_offloading': False}"):
        for rank, found in enumerate(states(tmp_path, config)):
            assert found == {
                "rank": rank, "world_size": 4, "hybrid": 2, "tp": 1, "tp_size": 1, "tp_rank": 0, "ep": [0, 1],
                "tp_group": [rank], "rep_group": [[0, 1], [2, 3]][rank // 2], "rep": [[0, 2], [1, 3]],
                "rep_rank": rank // 2, "off": False, "seed": 12345,
            }  # fmt: skip


def test_the_state_of_native_sharding_has_no_groups(tmp_path: Path) -> None:
    for found in states(tmp_path, "", world=2):
        assert found["hybrid"] == 0
        assert found["tp_group"] is None
        assert found["rep_group"] is None
        assert found["rep"] == [[0], [1]]
        assert found["rep_rank"] == 0


def test_the_launchers_file_is_used_and_wins(tmp_path: Path) -> None:
    settings = json.dumps({"hybrid_shard_degree": 2})
    assert [each["hybrid"] for each in states(tmp_path, "", settings)] == [2] * 4
    found = states(tmp_path, "{'hybrid_shard_degree': 4, 'random_seed': 3}", settings)
    assert [(each["hybrid"], each["seed"]) for each in found] == [(2, 3)] * 4


def test_one_rank_alone(tmp_path: Path) -> None:
    (found,) = states(tmp_path, "{}", world=1)
    assert found["world_size"] == 1
