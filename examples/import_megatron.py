"""Weights of a Megatron-LM or Megatron-LLaMA checkpoint, written as a Hugging Face folder.

    python examples/import_megatron.py checkpoints/llama out/llama --tokenizer tokenizers/llama

`model.from_hf` of a recipe, and `transformers`, load the second folder. A flag replaces what the arguments of the
checkpoint say of the model, or lack.
"""

import argparse
import sys
from pathlib import Path

import phalanx

OF_THE_MODEL = {
    "--heads": (int, "attention heads"),
    "--kv-heads": (int, "heads of keys and values; by default as many as --heads"),
    "--head-dim": (int, "width of a head; by default the model's over --heads"),
    "--seq-len": (int, "the longest sequence, in tokens"),
    "--vocab-size": (int, "without padding; by default that of the arguments, or of --tokenizer"),
    "--norm-eps": (float, "epsilon of the norms"),
    "--rope-theta": (float, "the rotary base"),
    "--rope-scaling-factor": (float, "factor of Llama 3.1's rotary scaling"),
    "--qkv": (str, "layout of queries, keys and values: groups (Megatron-LM) or blocks (Megatron-LLaMA)"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the checkpoint's folder, or that of one iteration")
    parser.add_argument("target", type=Path, help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--tokenizer", type=Path, help="a folder of tokenizer files, which are copied")
    parser.add_argument("--dtype", help="of the written weights, such as bfloat16; by default as stored")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file of weights, in 10^9 bytes")
    for flag, (kind, text) in OF_THE_MODEL.items():
        parser.add_argument(flag, type=kind, help=text)
    options = vars(parser.parse_args(arguments))
    try:
        found = phalanx.import_megatron(**options)
    except phalanx.errors.PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    spec = found.spec
    print(
        f"iteration {found.iteration} is now the Hugging Face folder {options['target']}: {spec.layers} layers, "
        f"{spec.heads} heads, {spec.kv_heads} of keys, a vocabulary of {spec.vocab_size}"
    )
    if found.stale:
        print("note: Megatron-LLaMA's overlapped optimizer saves the weights of the step before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
