"""A Megatron checkpoint as a Hugging Face folder, or with Adam's state as the first checkpoint of a run."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from phalanx.compat.megatron.args import MegatronOverrides
from phalanx.compat.megatron.files import MODEL_FILES, TRACKER
from phalanx.compat.megatron.optimizer_state import MASTER
from phalanx.compat.megatron.torch_dist import is_torch_dist
from phalanx.compat.megatron.weights import MegatronCheckpoint
from phalanx.compat.trained_state import PARAM, ModelFolder, TrainedState
from phalanx.core.errors import ConfigError
from phalanx.data.tokenizer import load_tokenizer
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import DTYPES
from phalanx.models.user_model import load_family_class


def is_megatron(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron's, or one of its iterations."""
    if not folder.is_dir():
        return False
    ranks = any((path / name).is_file() for path in folder.glob("mp_rank_*") for name in MODEL_FILES)
    return (folder / TRACKER).is_file() or is_torch_dist(folder) or ranks


def open_megatron(
    folder: Path, model: ModelFolder | None = None, step: int | None = None, moments: bool = False
) -> TrainedState:
    """The parameters, and with `moments` Adam's state and its masters, of a Megatron checkpoint by our names. The
    config.json of `model`, where given, supplies what the arguments of the checkpoint lack, and its folder the
    tokenizer. Raises ConfigError as MegatronCheckpoint does."""
    overrides = MegatronOverrides()
    if model is not None:
        known = model.spec
        overrides = MegatronOverrides(
            heads=known.heads, kv_heads=known.kv_heads, head_dim=known.head_dim, seq_len=known.max_seq_len,
            vocab_size=known.vocab_size, norm_eps=known.norm_eps, rope_theta=known.rope_theta,
        )  # fmt: skip
    found = MegatronCheckpoint(folder, overrides, moments)
    if model is not None and replace(model.spec, rope_scaling=found.spec.rope_scaling) != found.spec:
        raise ConfigError(
            f"{folder} is not of the model in {model.folder}/config.json; give that of the trained model, or none"
        )
    if model is None:
        model = ModelFolder(None, None, found.spec, load_family_class(found.spec.architecture))

    def read(name: str, kind: str) -> Tensor:
        return found.tensor(name, None if kind == PARAM else kind)

    return TrainedState(
        model, read, found.dtype, step or found.iteration, found.has_moments,
        read_master=(lambda name: found.tensor(name, MASTER)) if found.has_moments else None,
    )  # fmt: skip


def import_megatron(
    source: Path | str,
    target: Path | str,
    *,
    tokenizer: Path | str | None = None,
    dtype: str | None = None,
    max_shard_gb: float = 5.0,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    seq_len: int | None = None,
    vocab_size: int | None = None,
    norm_eps: float | None = None,
    rope_theta: float | None = None,
    rope_scaling_factor: float | None = None,
    qkv: str | None = None,
) -> MegatronCheckpoint:
    """Convert the weights of a Megatron-LM or Megatron-LLaMA checkpoint to a Hugging Face folder.

    Tensor and pipeline ranks are merged, whatever their number; neither Megatron nor a GPU is needed. `model.from_hf`
    of a recipe, and transformers, load the folder.

    Args:
        source: The folder with latest_checkpointed_iteration.txt, or one of its iterations.
        target: The folder to write, which must not exist or be empty.
        tokenizer: A folder with tokenizer files, which are copied.
        dtype: Type of the written weights: "bfloat16", "float16", "float32" or "float64". Default: as stored.
        max_shard_gb: Largest size of a file of weights, in 10^9 bytes.
        heads: Number of attention heads. This and all that follow replace what the checkpoint's arguments say, or lack.
        kv_heads: Number of heads of keys and values. Default: `heads`.
        head_dim: Width of a head. Default: the model's width divided by `heads`.
        seq_len: The longest sequence, in tokens.
        vocab_size: Size of the vocabulary without padding. Default: that of `tokenizer`.
        norm_eps: Epsilon of the norms.
        rope_theta: Base of the rotary embedding.
        rope_scaling_factor: Factor of the rotary scaling of Llama 3.1.
        qkv: Layout of queries, keys and values: "groups" as in Megatron-LM, or "blocks" as in Megatron-LLaMA.

    Returns:
        The checkpoint that was read: its `spec` is the model's shape, `iteration` the number of its step, and
        `stale` says whether its weights lag the optimizer by a step, as Megatron-LLaMA's overlapped optimizer has it.

    Raises:
        errors.ConfigError: a file or an argument is missing, damaged or does not fit; or `target` is not empty.

    Examples:
        >>> try:
        ...     phalanx.import_megatron("no-such-folder", "out")
        ... except phalanx.errors.ConfigError as error:
        ...     print("refused")
        refused
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    folder = Path(tokenizer) if tokenizer is not None else None
    opened = load_tokenizer(folder) if folder is not None else None
    overrides = MegatronOverrides(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_len=seq_len,
        vocab_size=vocab_size,
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling_factor=rope_scaling_factor,
        qkv=qkv,
        tokenizer_size=opened.vocab_size if opened is not None else None,
    )
    checkpoint = MegatronCheckpoint(Path(source), overrides)
    export(
        Path(target),
        checkpoint.spec,
        checkpoint.tensor,
        DTYPES[dtype] if dtype is not None else checkpoint.dtype,
        max_shard_bytes=int(max_shard_gb * 1e9),
        tokenizer_folder=folder,
        eos_id=opened.eos_id if opened is not None else None,
    )
    return checkpoint
