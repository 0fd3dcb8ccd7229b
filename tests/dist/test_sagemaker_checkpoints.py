"""Checkpoints of scripts: what is saved when, who has to wait for whom, and what is refused."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from phalanx.core.errors import CheckpointError
from phalanx.core.placement import Placement
from tests.dist.test_sagemaker_keys import data, net, wrapped
from tests.helpers import process_group, run_ranks, some
from tests.stores import S3Server


def begun(settings: dict[str, Any] | None = None) -> Any:
    import phalanx.compat.sagemaker  # noqa: F401, I001
    import torch.sagemaker as tsm

    tsm.init(settings)
    return tsm


def beside(placement: Placement, folder: str) -> list[Any]:
    """An asynchronous save keeps the values that there were when it was asked for, and is complete when finalised."""
    from phalanx.compat.sagemaker import files

    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls

        go = threading.Event()
        slow = files.DistributedFileSystemWriter(
            folder,
            pre_write_hooks=[lambda writer: go.wait(30)],
            post_write_hooks=[lambda writer: order.append("written")],
        )
        order: list[str] = []
        state = {"x": torch.full((4,), 1.0 + placement.rank * 0), "step": 7}
        async_save(state, storage_writer=slow)
        state["x"].fill_(9.0)
        order.append("went on")
        early = maybe_finalize_async_calls(blocking=False)
        there = Path(folder, ".metadata").exists()
        go.set()
        late = maybe_finalize_async_calls(blocking=True)
        found = {"x": torch.zeros(4), "step": 0}
        load(found, checkpoint_id=folder)
        again = maybe_finalize_async_calls()
        return [order, early, there, late, again, found["x"].tolist(), found["step"], slow.is_coordinator]


def test_a_save_goes_on_beside_the_script(tmp_path: Path) -> None:
    found = run_ranks(beside, 2, folder=str(tmp_path / "c"))
    for rank, (order, early, there, late, again, x, step, coordinates) in enumerate(found):
        assert order == ["went on", "written"]
        assert early == []
        assert not there
        assert late == [1]
        assert again == []
        assert x == [1.0] * 4
        assert step == 7
        assert coordinates == (rank == 0)


def finished_only_where_all_have(placement: Placement, folder: str) -> list[Any]:
    from phalanx.compat.sagemaker import files

    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save

        queue, go = AsyncCallsQueue(), threading.Event()
        hooks = [lambda writer: go.wait(30)] if placement.rank == 1 else []
        for name in ("a", "b"):
            writer = files.DistributedFileSystemWriter(f"{folder}/{name}", pre_write_hooks=hooks)
            async_save({"x": torch.ones(2)}, storage_writer=writer, queue=queue)
        time.sleep(0.3)
        early = queue.maybe_finalize_async_calls(blocking=False)
        left = queue.get_num_unfinalized_calls()
        go.set()
        late = queue.maybe_finalize_async_calls(blocking=True, skip_sync=True)
        queue.close()
        return [early, left, late]


def test_a_save_that_one_rank_still_writes_is_not_finalised(tmp_path: Path) -> None:
    assert run_ranks(finished_only_where_all_have, 2, folder=str(tmp_path)) == [[[], 2, [1, 2]]] * 2


def plans(placement: Placement, folder: str, force: bool) -> list[int]:
    """How often plans are exchanged in four saves, the last of another shape."""
    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls

        from phalanx.compat.sagemaker import saver

        counts = []
        for number, size in enumerate((4, 4, 4, 6)):
            state = {"x": torch.full((size,), float(number))}
            async_save(state, checkpoint_id=f"{folder}/{number}", force_check_all_plans=force)
            maybe_finalize_async_calls()
            counts.append(saver.default_queue().strategy.planned)
            found = {"x": torch.zeros(size)}
            load(found, checkpoint_id=f"{folder}/{number}")
            assert found["x"].tolist() == [float(number)] * size
        return counts


def test_known_plans_are_not_exchanged_again_unless_that_is_asked_for(tmp_path: Path) -> None:
    assert run_ranks(plans, 2, folder=str(tmp_path / "a"), force=False) == [[1, 1, 1, 2]] * 2
    assert run_ranks(plans, 2, folder=str(tmp_path / "b"), force=True) == [[1, 2, 3, 4]] * 2


def failing(placement: Placement, folder: str, wait: bool) -> str:
    """Rank 1 cannot write."""
    from phalanx.compat.sagemaker import files

    def fail(writer: Any) -> None:
        if placement.rank == 1:
            raise OSError("the disk is full")

    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls

        writer = files.DistributedFileSystemWriter(folder, pre_write_hooks=[fail])
        async_save({"x": torch.ones(2)}, storage_writer=writer, wait_error_handling=wait)
        try:
            maybe_finalize_async_calls()
        except Exception as error:
            return f"{type(error).__name__} {error}"
        return "fine"


def test_what_one_rank_cannot_write_fails_on_all_or_where_it_must(tmp_path: Path) -> None:
    for told in run_ranks(failing, 3, folder=str(tmp_path / "a"), wait=True):
        assert told.startswith("CheckpointError rank 1 of its group could not write (the disk is full)")
    first, second, third = run_ranks(failing, 3, folder=str(tmp_path / "b"), wait=False)
    assert first.startswith("CheckpointError rank 1 of its group could not write")
    assert second == "OSError the disk is full"
    assert third == "fine"


def groups(placement: Placement, folder: str) -> list[Any]:
    """Groups that do not hold rank 0, with the coordinator counted over all ranks, by our functions and by torch's."""
    with process_group(placement):
        tsm = begun({"hybrid_shard_degree": 2})
        import torch.distributed.checkpoint as dcp
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import save
        from torch.sagemaker.utils.process_group_utils import get_global_ranks

        model = wrapped(net())
        ranks = get_global_ranks(model.process_group)
        place = f"{folder}/{min(ranks)}"
        state = {"x": torch.full((3,), float(min(ranks)))}
        save(state, checkpoint_id=place, process_group=model.process_group, coordinator_rank=min(ranks))
        dcp.save_state_dict(
            state_dict=state,
            storage_writer=dcp.FileSystemWriter(f"{place}-torch"),
            process_group=model.process_group,
            coordinator_rank=min(ranks),
        )
        found = []
        for kind in ("", "-torch"):
            got = {"x": torch.zeros(3)}
            load(got, checkpoint_id=place + kind, process_group=model.process_group, coordinator_rank=min(ranks))
            found.append(got["x"].tolist())
        try:
            load({f"{placement.rank}": torch.zeros(1)}, checkpoint_id=place, process_group=model.process_group)
        except CheckpointError as error:
            found.append(str(error))
        assert tsm.state.world_size == 4
        return found


def test_groups_without_rank_0_save_and_load(tmp_path: Path) -> None:
    for rank, (ours, torchs, unlike) in enumerate(run_ranks(groups, 4, folder=str(tmp_path))):
        assert ours == torchs == [float(rank // 2 * 2)] * 3
        assert "requests other keys than rank 0" in unlike


def at_s3(placement: Placement, url: str, environment: dict[str, str]) -> list[Any]:
    """A model and its optimizer saved at a URL and loaded again, and a state saved beside the script."""
    os.environ.update(environment)
    with process_group(placement):
        begun({"hybrid_shard_degree": 2})
        from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
        from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls
        from torch.sagemaker.distributed.fsdp import checkpoint

        losses = []
        for resumed in (False, True):
            model = wrapped(net(seed=int(resumed)), use_orig_params=True)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            if resumed:
                checkpoint.load_model_checkpoint(model, StateDictType.SHARDED_STATE_DICT, url, optimizer=optimizer)
            for step in (1, 2) if resumed else (0, 1, 2):
                loss = model(torch.ones(2, 64) * step).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if step == 0:
                    checkpoint.save_model_checkpoint(model, StateDictType.SHARDED_STATE_DICT, url, optimizer=optimizer)
        async_save({"x": torch.full((3,), 7.0)}, checkpoint_id=f"{url}/beside", s3_region="us-east-1")
        maybe_finalize_async_calls()
        found = {"x": torch.zeros(3)}
        load(found, checkpoint_id=Path(f"{url}/beside"))
        return [losses, found["x"].tolist()]


def test_checkpoints_go_to_s3_and_come_back(bucket: str, s3_server: S3Server) -> None:
    for losses, found in run_ranks(at_s3, 2, url=bucket, environment=s3_server.environment):
        assert losses[1:3] == losses[3:]
        assert losses[1] != losses[0]
        assert found == [7.0] * 3
    from phalanx.storage import files as storage

    assert storage.exists(f"{bucket}/tp0_ep0/.metadata")


def local(placement: Placement) -> list[Any]:
    """Taking and loading a local state calls no collective; its tensors are those of the model."""
    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.state_dict_utils import (
            SMStateDictType,
            init_optim_state,
            sm_state_dict_type,
        )

        model = wrapped(net(), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        init_optim_state(optimizer, skip_empty_param=True)
        same = all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        steps = {float(state["step"]) for state in optimizer.state.values()}
        calls = []
        for name in ("all_gather_into_tensor", "all_reduce", "broadcast", "all_gather_object", "all_gather"):
            setattr(dist, name, lambda *args, **options: calls.append(args))
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            state = model.state_dict()
        held = sum(tensor.numel() for tensor in state.values())
        alias = {tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor.numel()}
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if parameter.numel()}
        return [same, steps == {0.0}, len(calls), held, alias == own, optimizer.param_groups[0]["lr"]]


def test_a_local_state_is_this_ranks_memory() -> None:
    found = run_ranks(local, 4)
    for same, zero, calls, _, alias, rate in found:
        assert same
        assert zero
        assert calls == 0
        assert alias
        assert rate == 0.1
    assert sum(each[3] for each in found) == sum(parameter.numel() for parameter in net().parameters())


def whole_call(placement: Placement, folder: str, degree: int, save: bool) -> list[Any]:
    """`save_model_checkpoint` and `load_model_checkpoint`."""
    with process_group(placement):
        begun({"hybrid_shard_degree": degree})
        from torch.sagemaker.distributed.fsdp import checkpoint

        model = wrapped(net(seed=0 if save else 5), use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        strategy, kind = ShardingStrategy.HYBRID_SHARD, StateDictType.SHARDED_STATE_DICT
        found: dict[str, Any] = {"identity": {}}
        if save:
            for step in range(2):
                model(data(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            checkpoint.save_model_checkpoint(
                model, kind, folder, strategy, None, log=placement.rank == 0, optimizer=optimizer, scheduler=scheduler,
                extra_exports={"total_steps": 2},
            )  # fmt: skip
        else:
            found = checkpoint.load_model_checkpoint(
                model, kind, folder, strategy, None, optimizer=optimizer, scheduler=scheduler,
                extra_imports={"total_steps": 0},
            )  # fmt: skip
        model(data(9)).square().sum().backward()
        optimizer.step()
        with FSDP.summon_full_params(model):
            sums = [float(parameter.double().sum()) for parameter in model.parameters()]
        return [sums, scheduler.get_last_lr(), found["identity"]]


def test_a_whole_model_is_saved_and_loaded_on_other_ranks_in_one_call(tmp_path: Path) -> None:
    saved, rates, _ = run_ranks(whole_call, 4, folder=str(tmp_path / "c"), degree=2, save=True)[0]
    for world, degree in some([(4, 2), (2, 2), (4, 4), (3, 3)], 1, 3):
        for loaded, their_rates, identity in run_ranks(
            whole_call, world, folder=str(tmp_path / "c"), degree=degree, save=False
        ):
            assert loaded == pytest.approx(saved, rel=1e-5, abs=1e-5)
            assert their_rates == rates
            assert identity == {"total_steps": 2}


def intervals(placement: Placement) -> list[Any]:
    with process_group(placement):
        begun()
        from torch.sagemaker.distributed.checkpoint.state_dict_utils import compute_auto_checkpoint_interval

        slow = placement.rank + 1.0
        found = compute_auto_checkpoint_interval([0.5 * slow], [0.8], [0.1], [2.0 * slow])
        return [found.interval, found.step_s, found.writing_s]


def test_the_interval_between_saves_is_the_slowest_ranks_writing() -> None:
    assert run_ranks(intervals, 2) == [[9, 0.5, 4.0]] * 2


def moments(placement: Placement, orig: bool) -> list[Any]:
    """Adam's two moments of one matrix, gathered as PyTorch's documentation does."""
    with process_group(placement):
        begun({"hybrid_shard_degree": 2})
        model = wrapped(net(), use_orig_params=orig)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            model(data(step)).square().sum().backward()
            optimizer.step()
        configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            found = FSDP.optim_state_dict(model, optimizer).get("state", {})  # rank 0 has it
        return [found[name][kind].tolist() for name in sorted(found) for kind in ("exp_avg", "exp_avg_sq")]


def test_each_kind_of_an_optimizers_state_is_saved_as_itself() -> None:
    ours, flat = (run_ranks(moments, 2, orig=orig)[0] for orig in (True, False))
    assert len(ours) == 18
    assert ours[0] != ours[1]
    assert ours == flat
