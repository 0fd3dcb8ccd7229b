"""Weights of a Megatron-LM or Megatron-LLaMA checkpoint, written as a Hugging Face folder.

    python examples/import_megatron.py checkpoints/llama out/llama --tokenizer tokenizers/llama

The first folder is the one with latest_checkpointed_iteration.txt, or one of its iterations. Tensor and pipeline
ranks are merged, whatever their number; neither Megatron nor a GPU is needed. What the checkpoint's arguments do not
say has a flag. `model.from_hf` of a recipe then starts from the second folder, and so does `transformers`.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from phalanx.compat.megatron.args import BLOCKS, GROUPS, MegatronOverrides
from phalanx.compat.megatron.weights import MegatronCheckpoint
from phalanx.core.errors import PhalanxError
from phalanx.data.tokenizer import Tokenizer, load_tokenizer
from phalanx.models.hf_export import export
from phalanx.models.hf_weights import DTYPES


def gigabytes(text: str) -> float:
    """A positive number of 10^9 bytes. Raises ValueError."""
    if not 0 < (value := float(text)) < 1e6:
        raise ValueError(text)
    return value


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("source", type=Path, help="the checkpoint's folder")
    found.add_argument("target", type=Path, help="the folder to write; it must not exist, or be empty")
    found.add_argument("--tokenizer", type=Path, help="a folder of tokenizer files, which are copied")
    found.add_argument("--dtype", choices=sorted(DTYPES), help="of the written weights; by default as stored")
    found.add_argument(
        "--max-shard-gb", type=float, default=5.0, help="the most a file of weights holds, in 10^9 bytes"
    )
    told = found.add_argument_group("the model, where the checkpoint's arguments are silent or wrong")
    told.add_argument("--heads", type=int)
    told.add_argument("--kv-heads", type=int, help="heads of keys and values; by default as many as --heads")
    told.add_argument("--head-dim", type=int, help="width of a head; by default the model's over --heads")
    told.add_argument("--seq-len", type=int, help="the longest sequence, in tokens")
    told.add_argument(
        "--vocab-size", type=int, help="without padding; by default that of the arguments, or of --tokenizer"
    )
    told.add_argument("--norm-eps", type=float)
    told.add_argument("--rope-theta", type=float, help="the rotary base")
    told.add_argument("--rope-scaling-factor", type=float, help="of Llama 3.1's rule")
    told.add_argument(
        "--qkv",
        choices=(GROUPS, BLOCKS),
        help="how queries, keys and values lie: groups as in Megatron-LM, blocks as in Megatron-LLaMA",
    )
    return found


def told_by(options: argparse.Namespace, tokenizer: Tokenizer | None) -> MegatronOverrides:
    """What the flags and the tokenizer say."""
    flags = {
        field.name: getattr(options, field.name)
        for field in fields(MegatronOverrides)
        if field.name != "tokenizer_size"
    }
    return MegatronOverrides(**flags, tokenizer_size=tokenizer.vocab_size if tokenizer is not None else None)


def run(options: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer is not None else None
    checkpoint = MegatronCheckpoint(options.source, told_by(options, tokenizer))
    spec = checkpoint.spec
    export(
        options.target,
        spec,
        checkpoint.tensor,
        DTYPES[options.dtype] if options.dtype else checkpoint.dtype,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
        tokenizer_folder=options.tokenizer,
        eos_id=tokenizer.eos_id if tokenizer is not None else None,
    )
    print(
        f"iteration {checkpoint.iteration} of {options.source} is now the Hugging Face folder {options.target}: "
        f"{spec.layers} layers, {spec.heads} heads, {spec.kv_heads} of keys, a vocabulary of {spec.vocab_size}"
    )
    if checkpoint.stale:
        print(
            "note: it was saved with Megatron-LLaMA's overlapped optimizer, which gathers parameters late, so that "
            "these weights are those of the step before"
        )


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parser().parse_args(arguments))
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
