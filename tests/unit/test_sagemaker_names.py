"""What can be imported under the library's names, and what is said of the rest."""

import contextlib
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.compat.sagemaker  # noqa: F401  # makes them known
from phalanx.compat.sagemaker.install import NAMES
from phalanx.core.errors import ConfigError
from phalanx.storage import files as storage


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_the_table_is_there(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module]:
        if name == "DEFAULT_ASYNC_REQUEST_QUEUE":  # of a session, which there is not here
            with pytest.raises(ConfigError, match=r"tsm\.init"):
                getattr(found, name)
        else:
            assert getattr(found, name) is not None
    assert dir(found) == sorted(NAMES[module])


def test_the_usual_forms_of_import_give_the_same() -> None:
    import torch.sagemaker as tsm
    from torch.sagemaker import state, transform
    from torch.sagemaker.utils import utils as tsm_utils

    assert tsm is torch.sagemaker  # type: ignore[attr-defined]
    assert tsm.state is state
    assert tsm.transform is transform
    assert tsm.utils.process_group_utils.get_global_ranks
    assert tsm.utils.utils is tsm_utils
    assert not tsm.is_initialized()


def test_a_name_that_is_not_provided_is_named() -> None:
    import torch.sagemaker as tsm

    with pytest.raises(AttributeError, match=r"torch\.sagemaker\.nonsense is not provided by Phalanx"):
        tsm.nonsense  # noqa: B018
    with pytest.raises(ImportError, match=r"cannot import name 'nonsense'.*provided by Phalanx"):
        from torch.sagemaker.grad_norm import nonsense  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"torch\.sagemaker\.nowhere is not provided by Phalanx"):
        import torch.sagemaker.nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="version 1 of that library is different"):
        import smdistributed.modelparallel.torch  # noqa: F401
    with pytest.raises(AttributeError, match=r"torch\.sagemaker\.state\.nonsense"):
        tsm.state.nonsense  # noqa: B018
    assert not hasattr(tsm, "nonsense")


def test_names_of_a_package_that_is_not_installed_can_be_imported_and_not_used() -> None:
    import transformer_engine
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16)
    with transformer_engine.pytorch.fp8_autocast(enabled=False, fp8_recipe=recipe):
        pass
    # Libraries such as peft ask whether a layer is one of these.
    assert not isinstance(torch.nn.Linear(2, 2), transformer_engine.pytorch.Linear)
    with pytest.raises(ConfigError, match=r"transformer_engine\.pytorch\.GroupedLinear is used, but"):
        transformer_engine.pytorch.GroupedLinear  # noqa: B018
    assert not hasattr(transformer_engine.pytorch, "GroupedLinear")
    with pytest.raises(ModuleNotFoundError, match="install it where more is needed"):
        import transformer_engine.jax


def test_layers_in_place_of_transformer_engines_follow_autocast() -> None:
    import transformer_engine.pytorch as te
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    x = torch.randn(3, 128, requires_grad=True)
    for layer in (
        te.Linear(128, 64, bias=False),
        te.LayerNormLinear(128, 64, normalization="RMSNorm"),
        te.LayerNormMLP(128, 256, activation="swiglu"),
    ):
        plain = torch.autograd.grad(layer(x).square().sum(), x)[0]
        with te.fp8_autocast(enabled=True):
            rounded = layer(x, is_first_microbatch=True)
            again = [te.checkpoint(layer, x), checkpoint(layer, x, use_reentrant=True)]
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (rounded, again[0])]
        again[1].square().sum().backward()  # of a reentrant one autograd.grad knows nothing
        assert x.grad is not None
        grads.append(x.grad)
        x.grad = None
        assert 1e-4 < float((grads[0] - plain).norm() / plain.norm()) < 0.2
        assert torch.equal(grads[1], grads[0]) and torch.equal(grads[2], grads[0])
        with te.fp8_autocast(enabled=True):
            alone = te.checkpoint(layer, x)
        te.Linear(128, 2)(torch.zeros(1, 128))  # another layer, not in FP8
        assert torch.equal(torch.autograd.grad(alone.square().sum(), x)[0], grads[0])
        assert torch.equal(torch.autograd.grad(layer(x).square().sum(), x)[0], plain)
    with pytest.raises(ConfigError, match="Linear got tp_size, which needs Transformer Engine itself"):
        te.Linear(2, 2, tp_size=2)
    with pytest.raises(ConfigError, match="Linear got fp8_output, which needs Transformer Engine itself"):
        te.Linear(2, 2)(torch.zeros(1, 2), fp8_output=True)
    with pytest.raises(ConfigError, match="activation='tanh'; use one of gelu"):
        te.LayerNormMLP(2, 2, activation="tanh")
    with pytest.raises(ConfigError, match="normalization='BatchNorm'; use LayerNorm or RMSNorm"):
        te.LayerNormLinear(2, 2, normalization="BatchNorm")


@pytest.mark.parametrize(("groups", "interleaved", "first"), [(4, True, False), (2, True, True), (2, False, False)])
def test_attention_in_place_of_transformer_engines(groups: int, interleaved: bool, first: bool) -> None:
    """Against a plain computation, with the rows of its projection as Transformer Engine orders them."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.TransformerLayer(
        16, 32, 4, groups, hidden_dropout=0.0, attention_dropout=0.0, qkv_weight_interleaved=interleaved,
        attn_input_format="bshd" if first else "sbhd",
    ).double()  # fmt: skip
    assert set(layer.state_dict()) == {
        f"{part}.{name}"
        for part, names in {
            "self_attention.layernorm_qkv": ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
            "self_attention.proj": ("weight", "bias"),
            "layernorm_mlp": (
                "layer_norm_weight",
                "layer_norm_bias",
                "fc1_weight",
                "fc1_bias",
                "fc2_weight",
                "fc2_bias",
            ),
        }.items()
        for name in names
    }
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    angles = (torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1]).repeat(2))[:, None, None]
    mixed = layer.self_attention.layernorm_qkv(x)
    each = 4 // groups
    heads = mixed.view(2, 5, -1, 4)
    order = [("q", h) for h in range(4)] + [("k", g) for g in range(groups)] + [("v", g) for g in range(groups)]
    if interleaved:
        order = [row for g in range(groups) for row in
                 [*(("q", g * each + h) for h in range(each)), ("k", g), ("v", g)]]  # fmt: skip
    found = {name: heads[:, :, at] for at, name in enumerate(order)}
    turned = torch.view_as_complex(torch.stack((angles.flatten(1)[:, :2].cos(), angles.flatten(1)[:, :2].sin()), -1))
    outputs = []
    for head in range(4):
        q, k = (
            torch.view_as_complex(torch.stack(found[name].chunk(2, -1), -1)) * turned
            for name in (("q", head), ("k", head // each))
        )
        scores = (q[:, :, None] * k[:, None].conj()).real.sum(-1) / 2
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ found["v", head // each])
    hidden = x + layer.self_attention.proj(torch.cat(outputs, -1))
    expected = hidden + layer.layernorm_mlp(hidden)
    given = x if first else x.transpose(0, 1)
    output = layer(given, rotary_pos_emb=angles)
    assert torch.allclose(output if first else output.transpose(0, 1), expected, atol=1e-12)
    padded = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    padded[..., 3:] = True
    short = layer(given, padded, "padding_causal", rotary_pos_emb=angles)
    assert torch.allclose((short if first else short.transpose(0, 1))[:, :3], expected[:, :3], atol=1e-12)


def test_what_attention_in_place_of_transformer_engines_refuses() -> None:
    import transformer_engine.pytorch as te

    x = torch.zeros(2, 1, 16)
    layer = te.TransformerLayer(16, 32, 4, seq_length=2, micro_batch_size=1, window_size=(-1, -1))  # ask for nothing
    assert layer(x, is_first_microbatch=False).shape == x.shape
    for options, sentence in (
        ({"attention_type": "cross"}, "MultiheadAttention got attention_type='cross'; use one of self"),
        ({"qkv_format": "thd"}, "qkv_format='thd'; use one of sbhd, bshd"),
        ({"window_size": (128, 0)}, "MultiheadAttention got window_size, which needs Transformer Engine"),
        ({"num_gqa_groups": 3}, "4 heads in 3 groups; choose num_gqa_groups that divides"),
        ({"sequence_parallel": True, "tp_size": 2}, "got sequence_parallel, tp_size, which needs Transformer Engine"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            te.MultiheadAttention(16, 4, **options)
    with pytest.raises(ConfigError, match="MultiheadAttention got encoder_output, which needs Transformer Engine"):
        te.MultiheadAttention(16, 4)(torch.zeros(2, 1, 16), encoder_output=torch.zeros(2, 1, 16))


def test_the_real_package_is_left_alone_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("installed = True")
    monkeypatch.syspath_prepend(tmp_path)
    with monkeypatch.context() as imported:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            imported.delitem(sys.modules, name)
        assert importlib.import_module("transformer_engine").installed
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'transformer_engine\.pytorch'"):
            importlib.import_module("transformer_engine.pytorch")
        del sys.modules["transformer_engine"]


def test_llamas_attention_is_put_in_the_place_of_a_layers_own() -> None:
    from torch.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(20).view(2, 10)
    before = model(input_ids=ids).logits
    for layer in model.model.layers:
        own, layer.self_attn = layer.self_attn, LlamaFlashAttention(model.config)
        layer.self_attn.load_state_dict(own.state_dict())
        assert layer.self_attn.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before)
    with pytest.raises(ConfigError, match="set use_cache to False"):
        model(input_ids=ids)


def test_before_init_what_needs_it_says_so() -> None:
    import torch.sagemaker as tsm

    for act in (lambda: tsm.state.tp_rank, lambda: tsm.transform(torch.nn.Linear(2, 2))):
        with pytest.raises(ConfigError, match=r"call (that|tsm\.init\(\)) first"):
            act()


def test_installing_again_changes_nothing() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from phalanx.compat.sagemaker.install import install

    before = FullyShardedDataParallel.__init__
    install()
    assert FullyShardedDataParallel.__init__ is before


def test_parameters_without_memory_and_buffers_moved() -> None:
    from torch.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    assert empty_module_params(model, device=torch.device("cpu")) is model
    assert model[0].weight.is_meta, "a child is not its own"
    empty_module_params(model, device=torch.device("cpu"), recurse=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert [each.requires_grad for each in model[0].parameters()] == [False, True]
    move_buffers_to_device(model, torch.device("cpu"))
    assert model[1].running_mean.is_meta
    move_buffers_to_device(model, torch.device("cpu"), recurse=True)
    assert not model[1].running_mean.is_meta


def test_timeit_logs_on_rank_0_where_it_should(caplog: pytest.LogCaptureFixture) -> None:
    from torch.sagemaker.logger import get_logger
    from torch.sagemaker.utils.utils import timeit

    get_logger().addHandler(caplog.handler)
    with caplog.at_level(logging.INFO):
        for condition, rank in ((True, 0), (False, 0), (True, 1)):
            with timeit(condition, "the work", rank):
                pass
    get_logger().removeHandler(caplog.handler)
    assert len([record for record in caplog.records if "the work" in record.getMessage()]) == 1


def test_the_newest_folders_are_kept(tmp_path: Path) -> None:
    from torch.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs

    names = ["llama-2steps", "llama-10steps", "llama-9steps", "other"]
    for name in names:
        (tmp_path / name).mkdir()
    limit_num_subdirs(tmp_path, 2, sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$", log=False)
    assert len(list(tmp_path.iterdir())) == 4, "another rank removes"
    limit_num_subdirs(tmp_path, 0, sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$", log=True)
    assert len(list(tmp_path.iterdir())) == 4
    limit_num_subdirs(tmp_path, 2, sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$", log=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-10steps", "llama-9steps", "other"]


def test_urls_of_s3_are_known_and_its_settings_are_for_them_alone() -> None:
    from torch.sagemaker.distributed.checkpoint import filesystem, s3_filesystem

    assert s3_filesystem.is_s3_uri("s3://bucket/key")
    assert s3_filesystem.is_s3_uri(Path("s3://bucket/key"))
    assert not s3_filesystem.is_s3_uri("/folder")
    assert s3_filesystem.format_s3_path(Path("s3://bucket/key")) == "s3://bucket/key"
    assert isinstance(filesystem.path_to_file_system(Path("s3://bucket")), s3_filesystem.S3FileSystem)
    assert not isinstance(filesystem.path_to_file_system("/folder"), s3_filesystem.S3FileSystem)
    with pytest.raises(ConfigError, match="s3_region and s3client_config are for s3:// URLs, not for /folder"):
        filesystem.DistributedFileSystemWriter("/folder", s3_region="eu-west-1")
    with pytest.raises(ConfigError, match="s3client_config configures a client that is not used here"):
        filesystem.DistributedFileSystemReader("s3://bucket", s3client_config=object())


def test_files_at_s3(bucket: str) -> None:
    from torch.sagemaker.checkpoint.utils import limit_num_subdirs
    from torch.sagemaker.distributed.checkpoint.s3_filesystem import S3FileSystem

    files = S3FileSystem()
    path = files.concat_path(Path(bucket), "a.tmp")
    with files.create_stream(path, "wb") as stream:
        stream.write(b"some bytes")
    files.rename(path, f"{bucket}/a")
    with files.create_stream(f"{bucket}/a", "rb") as stream:
        assert stream.read() == b"some bytes"
    with contextlib.suppress(OSError), files.create_stream(f"{bucket}/b", "wb") as stream:
        stream.write(b"half")
        raise OSError("the disk is full")
    assert files.ls(bucket) == [f"{bucket}/a"]
    files.rm_file(f"{bucket}/a")
    assert not files.exists(f"{bucket}/a")
    for name in ("c-2steps", "c-10steps", "c-9steps"):
        storage.write_bytes(f"{bucket}/{name}/.metadata", b"x")
    assert limit_num_subdirs(Path(bucket), 2) == [f"{bucket}/c-2steps"]
    assert [one.name for one in storage.list_folder(bucket)] == ["c-10steps", "c-9steps"]


def test_what_fails_is_tried_again() -> None:
    from torch.sagemaker.distributed.checkpoint.s3_filesystem import retry_with_jitter

    calls = []

    @retry_with_jitter
    def shaky(fails: int) -> str:
        calls.append(1)
        if len(calls) <= fails:
            raise OSError("no")
        return "done"

    assert shaky(1) == "done"
    assert len(calls) == 2
    calls.clear()
    with pytest.raises(OSError, match="no"):
        shaky(99)
    assert len(calls) == 3


FLASH_ATTN = '''
import torch.nn.functional as F
calls = []

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """(batch, sequence, heads, head size), as the real one."""
    calls.append((dropout_p, softmax_scale, causal))
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
'''


@pytest.fixture
def flash_attn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package flash_attn of the real one's signature, which computes by PyTorch's kernels."""
    from phalanx.compat.sagemaker import attention

    (tmp_path / "flash_attn.py").write_text(FLASH_ATTN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    attention._installed.cache_clear()
    yield importlib.import_module("flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn")
    attention._installed.cache_clear()


def test_flash_attn_is_taken_where_its_kernels_fit(flash_attn: Any) -> None:
    from phalanx.compat.sagemaker.attention import flash_attention

    half, brain = torch.float16, torch.bfloat16
    assert flash_attention((8, 0), brain, 128) is flash_attn.flash_attn_func
    assert flash_attention((9, 0), half, 256) is flash_attn.flash_attn_func
    others = [((0, 0), brain, 64), ((7, 5), half, 64), ((9, 0), torch.float32, 64), ((9, 0), brain, 264)]
    assert [flash_attention(*each) for each in others] == [None] * 4


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_and_pytorch_agree(flash_attn: Any, causal: bool, kv_heads: int) -> None:
    from phalanx.compat.sagemaker.attention import _attend, by_flash_attention

    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.bfloat16)
    key, value = (torch.randn(2, kv_heads, 5, 8, dtype=torch.bfloat16) for _ in range(2))
    found = by_flash_attention(flash_attn.flash_attn_func, query, key, value, causal, 0.0, 0.3)
    torch.testing.assert_close(found, _attend(query, key, value, None, causal, 0.0, 0.3))
    assert flash_attn.calls == [(0.0, 0.3, causal)], "on a CPU it is not called"


def test_without_flash_attn_there_is_none() -> None:
    from phalanx.compat.sagemaker.attention import flash_attention

    if importlib.util.find_spec("flash_attn") is None:
        assert flash_attention((9, 0), torch.bfloat16, 64) is None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["b h s d", "b s h d"])
def test_attention_is_that_of_its_definition(causal: bool, layout: str) -> None:
    from torch.sagemaker.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(1, 4, 1, 5, dtype=torch.float64)

    def plain(k: torch.Tensor, v: torch.Tensor, scale: float, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * scale + bias
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        return scores.softmax(-1) @ v

    def laid(each: torch.Tensor) -> torch.Tensor:
        return each.transpose(1, 2) if layout == "b s h d" else each

    axis = 2 if layout == "b s h d" else 1
    packed = torch.cat([laid(q), laid(k), laid(v)], dim=axis)
    for qkv in (packed, (laid(q), laid(k), laid(v))):
        found = FlashSelfAttention()(qkv, causal=causal, layout=layout)
        torch.testing.assert_close(found, plain(k, v, 8**-0.5))
    biased = FlashSelfAttention(scale=0.3, triton_flash_attention=True, use_alibi=True)
    torch.testing.assert_close(biased(packed, attn_mask=bias, causal=causal, layout=layout), plain(k, v, 0.3, bias))
    few = torch.cat([laid(k[:, :2]), laid(v[:, :2])], dim=axis)
    shared = k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1)
    found = FlashGroupedQueryAttention()(laid(q), few, causal=causal, layout=layout)
    torch.testing.assert_close(found, plain(*shared, 8**-0.5))
    with pytest.raises(ConfigError, match="attn_mask needs"):
        FlashSelfAttention()(packed, attn_mask=bias, layout=layout)
