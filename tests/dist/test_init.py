"""`phalanx.init` and `phalanx.transform`: what FSDP of both kinds makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from phalanx.core.errors import ConfigError
from phalanx.core.placement import Placement
from tests.dist.test_sagemaker_keys import Net, data, net, wrapped
from tests.helpers import process_group, run_ranks, some


def with_fully_shard(placement: Placement, config: dict[str, Any] | None) -> list[Any]:
    import phalanx

    with process_group(placement):
        phalanx.init(config)
        model = phalanx.transform(net())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        elements = sum(parameter.to_local().numel() for parameter in model.parameters())
        model(data(placement.rank)).square().sum().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor())
        return [elements, norm, list(model.last.weight.device_mesh.mesh.shape)]


def with_fsdp(placement: Placement, config: dict[str, Any] | None) -> list[Any]:
    import phalanx

    with process_group(placement):
        phalanx.init(config)
        model = wrapped(phalanx.transform(net()))
        model(data(placement.rank)).square().sum().backward()
        return [dist.get_process_group_ranks(model.process_group), float(model.clip_grad_norm_(1e9))]


def test_two_lines_shard_as_they_say(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"shard_degree": 2}')
    plain = run_ranks(with_fsdp, 4, config=None)
    assert [each[0] for each in plain] == [[0, 1, 2, 3]] * 4
    norm = plain[0][1]
    halves = run_ranks(with_fsdp, 4, config=str(file))
    assert [each[0] for each in halves] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each[1] for each in halves] == pytest.approx([norm] * 4, rel=1e-5)
    total = sum(parameter.numel() for parameter in Net().parameters())
    for config, shape in some([(None, [4]), ({"shard_degree": 2}, [2, 2]), ({"shard_degree": 1}, [4, 1])], 0, 1):
        found = run_ranks(with_fully_shard, 4, config=config)
        assert [each[1] for each in found] == pytest.approx([norm] * 4, rel=1e-5)
        assert [each[2] for each in found] == [shape] * 4
        assert sum(each[0] for each in found) == total * (4 // shape[-1])


def refusal(placement: Placement, config: Any, twice: Any = None, first: bool = True) -> str:
    import phalanx

    with process_group(placement):
        try:
            if first:
                phalanx.init(config)
            if twice is not None:
                phalanx.init(twice)
            phalanx.transform(net())
            wrapped(net())
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"shard_degree": 3}, {}, "shard_degree is 3, but there are 2 ranks"),
        ({"shard_degree": 0}, {}, "shard_degree is 0, but there are 2 ranks"),
        ({"tensor": "2"}, {}, "phalanx.init got tensor='2'"),
        ({"tensors": 2}, {}, "did you mean tensor?"),
        ([1], {}, "not list"),
        ({}, {"twice": {"shard_degree": 2}}, "call phalanx.init once"),
        ({"shard_degree": 2}, {"twice": {"shard_degree": 2}}, ""),
        ({}, {"first": False}, "call phalanx.init first"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(config: Any, options: dict[str, Any], says: str) -> None:
    for told in run_ranks(refusal, 2, config=config, **options):
        assert says in told
        assert bool(told) == bool(says)
