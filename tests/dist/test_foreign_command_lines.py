"""Command lines of Megatron-LLaMA and HetSeq, as their users type them, trained from the first step to the last."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.core.records import read_events, read_steps
from phalanx.core.run_paths import RunPaths
from phalanx.data.megatron_dataset import write_indexed_dataset
from phalanx.data.record_files import TokenFile
from tests.dist import command
from tests.helpers import ALL
from tests.shards import write_shard
from tests.token_sets import TokenWriter

VOCAB = 70
LLAMA = shlex.split("""
--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --lr-decay-iters 6
--lr-warmup-iters 1 --min-lr 1e-3 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
--weight-decay 0.1 --overlapped-distributed-optimizer --reduce-bucket-size=2e8 --data-impl mmap --data-path 1.0 m
--split 90,10,0 --eval-interval 6 --eval-iters 1 --save-interval 3 --save checkpoints --hidden-dropout 0.1
--attention-dropout 0.1 --use-rotary-position-embeddings --no-position-embedding --swiglu --RMSNorm
--layernorm-epsilon 1e-6 --causal-lm --untie-embeddings-and-output-weights --disable-bias-linear
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path words --make-vocab-size-divisible-by 1 --log-interval 1
""")
BERT = shlex.split("""
--task bert --data shards --dict bert/vocab.txt --config_file bert/config.json --num_file 0 --max-sentences 16
--fast-stat-sync --max-update 60 --update-freq 2 --valid-subset test --num-workers 4 --warmup-updates 1
--total-num-update 60 --lr 0.003 --weight-decay 0.01 --distributed-world-size 1 --save-dir out
--adam-betas '(0.9,0.98)' --clip-norm 1
""")


def write_megatron(folder: Path) -> None:
    """An indexed data set in which each token follows from the one before, and the tokenizer that it is of."""
    writer, generator = TokenWriter(folder / "set", VOCAB, 0, "words"), np.random.default_rng(0)
    for _ in range(40):
        writer.append((int(generator.integers(1, VOCAB)) + 7 * np.arange(60)) % (VOCAB - 1) + 1)
    writer.finish()
    write_indexed_dataset(TokenFile(folder / "set"), folder / "m")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder / "words")


def write_hetseq(folder: Path) -> None:
    write_shard(folder / "shards" / "train_0.hdf5", rows=120, vocab=VOCAB)
    (folder / "bert").mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(5, VOCAB))]
    (folder / "bert" / "vocab.txt").write_text("\n".join(words) + "\n")
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "max_position_embeddings": 32}  # fmt: skip
    (folder / "bert" / "config.json").write_text(json.dumps(shape))


@pytest.mark.parametrize("system", ["megatron", *(["hetseq"] if ALL else [])])
def test_a_command_line_trains(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, words, folder = {
        "megatron": (write_megatron, ["pretrain_llama.py", *LLAMA], "checkpoints"),
        "hetseq": (write_hetseq, ["train.py", *BERT], "out"),
    }[system]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path)
    code, out, err = command.phalanx(tmp_path, "run", "--nproc", "2", *words, timeout_s=180, block_s=0.004)
    assert code == 0, err
    assert f"# {words[0]} as a recipe\nmodel:\n" in out
    paths = RunPaths(tmp_path / folder)
    losses = [step["loss"] for step in read_steps(paths.metrics)]
    assert len(losses) == (6 if system == "megatron" else 60)
    assert sum(losses[-3:]) < 3 * losses[0] - 0.5, losses
    if system == "megatron":
        assert [event["step"] for event in read_events(paths.events) if event["kind"] == "checkpoint_saved"] == [3, 6]
