"""Command lines of Megatron-LLaMA and HetSeq become recipes, and no flag is ignored in silence."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from phalanx.cli import command_lines as shown
from phalanx.compat import hetseq_command_line
from phalanx.compat.command_lines import map_command
from phalanx.config.load import build_config
from phalanx.config.resolve import resolve_autos
from phalanx.config.schema import Config, get_knob
from phalanx.core.errors import ConfigError
from tests.shards import write_shard

# LLaMA2_7B_standalone.sh of Megatron-LLaMA, in its words.
LLAMA = shlex.split("""
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 32 --hidden-size 4096
--ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4
--global-batch-size 256 --train-iters 1000 --lr 6.0e-5 --lr-decay-iters 10 --lr-warmup-iters 5 --min-lr 6.0e-6
--override-opt_param-scheduler --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
--weight-decay 0.1 --overlapped-distributed-optimizer --reduce-bucket-size=2e8 --no-gradient-accumulation-fusion
--dataloader-type cyclic --data-impl mmap --data-path 0.2 first 0.3 second 0.5 third --split 98,2,0
--eval-interval 1000 --eval-iters 10 --save-interval 500 --save checkpoints/llama --init-method-std 0.01
--hidden-dropout 0.0 --attention-dropout 0.0 --bf16 --recompute-activations --recompute-granularity selective
--use-rotary-position-embeddings --no-position-embedding --swiglu --RMSNorm --layernorm-epsilon 1e-6 --causal-lm
--untie-embeddings-and-output-weights --disable-bias-linear --tokenizer-type PretrainedFromHF
--tokenizer-name-or-path tokenizers/llama --make-vocab-size-divisible-by 1 --job-name seven --log-interval 1
""")
HETSEQ = shlex.split("""
--task bert --data DATA --dict FOLDER/vocab.txt --config_file FOLDER/config.json --num_file 0
--max-sentences 32 --fast-stat-sync --max-update 900000 --update-freq 4 --valid-subset test --num-workers 4
--warmup-updates 10000 --total-num-update 1000000 --lr 0.0001 --weight-decay 0.01 --distributed-world-size 8
--distributed-gpus 4 --save-dir out --adam-betas '(0.9,0.98)' --clip-norm 1 --distributed-init-method tcp://a:1
""")


def without(words: list[str], *names: str) -> list[str]:
    """The flags without some of them, and without their values."""
    kept, skips = [], False
    for word in words:
        if word.startswith("--"):
            skips = word[2:] in names
        if not skips:
            kept.append(word)
    return kept


def recipe_of(script: str, words: list[str]) -> Config:
    mapped = map_command(script, words)
    assert mapped is not None
    return resolve_autos(build_config(mapped.recipe, "here"), device="cpu", world=1)[0]


def test_megatron_llama_is_the_recipe_of_the_migration_page() -> None:
    mapped = map_command("pretrain_llama.py", LLAMA)
    assert mapped is not None
    assert mapped.run_dir == "checkpoints/llama"
    config = recipe_of("pretrain_llama.py", LLAMA)
    expected: dict[str, Any] = {
        "model.layers": 32, "model.hidden": 4096, "model.heads": 32, "model.kv_heads": None, "model.norm_eps": 1e-6,
        "model.intermediate": 11008, "model.tie_embeddings": False, "model.init_std": 0.01, "model.dropout": 0.0,
        "data.seq_len": 4096, "data.held_out": 0.02, "data.tokenizer": "tokenizers/llama", "train.steps": 1000,
        "train.global_batch": 256, "train.micro_batch": 4, "train.dtype": "bf16", "train.eval_sequences": 2560,
        "train.seed": 1234, "optim.lr": 6e-5, "optim.min_lr_ratio": pytest.approx(0.1), "optim.schedule": "cosine",
        "optim.warmup_steps": 5, "optim.decay_steps": 10, "optim.beta2": 0.95, "optim.eps": 1e-8,
        "optim.weight_decay": 0.1, "memory.activations": "selective", "checkpoint.every": 500,
    }  # fmt: skip
    assert {key: get_knob(config, key) for key in expected} == expected
    assert [(source.path, source.weight) for source in config.data.source if not isinstance(source, str)] == [
        (["first.idx"], 0.2), (["second.idx"], 0.3), (["third.idx"], 0.5),
    ]  # fmt: skip
    named = set(mapped.passed_over)
    assert {"override-opt-param-scheduler", "reduce-bucket-size", "data-impl", "job-name", "swiglu"} <= named
    assert not named & {"lr", "save", "bf16", "tensor-model-parallel-size", "recompute-granularity"}


def test_what_a_flag_leaves_out_has_megatrons_default() -> None:
    bare = without(
        LLAMA, "ffn-hidden-size", "weight-decay", "adam-beta2", "hidden-dropout", "attention-dropout", "split",
        "lr-decay-style", "min-lr", "untie-embeddings-and-output-weights", "recompute-activations",
        "recompute-granularity", "lr-decay-iters", "bf16", "init-method-std", "layernorm-epsilon",
    )  # fmt: skip
    mapped, config = map_command("some/pretrain_gpt.py", bare), recipe_of("pretrain_gpt.py", bare)
    assert mapped is not None
    assert mapped.recipe["model"]["attention_dropout"] == 0.1
    assert (config.model.intermediate, config.model.dropout, config.model.tie_embeddings) == (10880, 0.1, True)
    assert (config.optim.weight_decay, config.optim.beta2, config.optim.schedule) == (0.01, 0.999, "linear")
    assert (config.optim.min_lr_ratio, config.optim.decay_steps, config.train.dtype) == (0.0, 1000, "fp32")
    assert (config.data.held_out, config.memory.activations) == (0.03, "none")


def test_limits_ramp_masks_and_layouts_are_mapped() -> None:
    more = "--exit-duration-in-mins 90 --exit-interval 50 --rampup-batch-size 64 64 10000 --eod-mask-loss"
    more += " --tensor-model-parallel-size 2 --sequence-parallel --unheard-of 3 --optimizer sgd --data-path one"
    words = [*without(LLAMA, "adam-beta1", "adam-beta2"), *more.split()]
    mapped = map_command("pretrain_llama.py", words)
    assert mapped is not None
    tree = mapped.recipe
    assert (tree["train"]["stop_after"], tree["train"]["stop_every"]) == ("90min", 50)
    assert (tree["train"]["rampup_batch"], tree["data"]["mask_document_end"]) == ([64, 64, 10000], True)
    assert (tree["parallel"]["tensor"], tree["parallel"]["sequence_parallel"]) == (2, True)
    assert (tree["optim"]["name"], tree["optim"]["options"]) == ("sgd", {"momentum": 0.9})
    assert tree["data"]["source"] == ["one.idx"]
    assert mapped.passed_over["unheard-of"] == "nothing here corresponds to it"
    build_config(tree, "here")
    mapped = map_command("pretrain_llama.py", [*LLAMA, "--context-parallel-size", "4", "--reset-attention-mask"])
    assert mapped is not None and mapped.recipe["parallel"]["context"] == 4
    assert mapped.recipe["data"]["isolate_documents"] == ("--reset-position-ids" in LLAMA)
    assert "reset-attention-mask" in mapped.passed_over


def test_scaled_positions_and_counts_of_samples_are_mapped() -> None:
    words = without(LLAMA, "train-iters", "lr-decay-iters", "lr-warmup-iters", "RMSNorm", "bf16")
    more = "--train-samples 5121 --lr-decay-samples 2560 --lr-warmup-samples 257 --use-rope-scaling --fp16 "
    more += "--normalization RMSNorm --rotary-percent 1.0 --rope-scaling-factor 4 --loss-scale 1024"
    words += more.split()
    mapped, config = map_command("pretrain_gpt.py", words), recipe_of("pretrain_gpt.py", words)
    assert mapped is not None and not mapped.passed_over.keys() & {"lr-decay-samples", "use-rope-scaling", "loss-scale"}
    assert (config.train.steps, config.optim.decay_steps, config.optim.warmup_steps) == (20, 10, 1)
    assert (config.train.dtype, config.train.loss_scale) == ("fp16", 1024.0)
    scaling = config.model.rope_scaling
    assert scaling is not None and (scaling.rule, scaling.factor) == ("llama3", 4.0)


def write_bert(folder: Path) -> list[str]:
    shape = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072, "max_position_embeddings": 512}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    return [word.replace("FOLDER", str(folder)) for word in HETSEQ]


def test_hetseq_bert_is_masked_training_on_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests have started threads here, with which nothing is forked.
    monkeypatch.setattr(hetseq_command_line, "fork_call", lambda function, *args, timeout_s: function(*args))
    words = write_bert(tmp_path)
    mapped, config = map_command("hetseq/train.py", words), recipe_of("train.py", words)
    assert mapped is not None
    assert (mapped.system, mapped.run_dir) == ("HetSeq", "out")
    expected: dict[str, Any] = {
        "task.kind": "masked", "task.next_sentence": True, "data.format": "masked", "data.source": ["DATA"],
        "data.tokenizer": str(tmp_path), "model.hidden": 768, "model.layers": 12, "train.global_batch": 32 * 8 * 4,
        "train.steps": 900000, "optim.lr": 1e-4, "optim.beta2": 0.98, "optim.schedule": "polynomial",
        "optim.power": 1.0, "optim.decay_steps": 1000000, "optim.warmup_steps": 10000, "optim.clip_norm": 1.0,
        "train.seed": 19940802,
    }  # fmt: skip
    assert {key: get_knob(config, key) for key in expected} == expected
    assert {"num-file", "fast-stat-sync", "num-workers", "distributed-init-method", "valid-subset"} <= set(
        mapped.passed_over
    )
    write_shard(tmp_path / "DATA" / "train_0.hdf5", rows=3, width=40)
    long, rows = config.data.seq_len, [word.replace("DATA", str(tmp_path / "DATA")) for word in words]
    assert (long, recipe_of("train.py", rows).data.seq_len) == (512, 40)  # rows may be shorter than the positions
    epochs = [*without(words, "max-update"), "--max-epoch", "5"]
    assert recipe_of("train.py", epochs).train.epochs == 5


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        ("pretrain_llama.py", without(LLAMA, "hidden-size"), "--hidden-size is missing"),
        ("pretrain_llama.py", [*LLAMA, "--num-experts", "8"], "--num-experts 8 makes another model than a LLaMA"),
        ("pretrain_gpt.py", [*LLAMA, "--qk-layernorm"], "--qk-layernorm True makes another model than a LLaMA"),
        ("pretrain_gpt.py", [*LLAMA, "--rotary-percent", "0.5"], "--rotary-percent 0.5 makes another model"),
        (
            "pretrain_gpt.py",
            [*LLAMA, "--position-embedding-type", "learned_absolute"],
            "--position-embedding-type learned_absolute makes another model than a LLaMA",
        ),
        ("pretrain_gpt.py", without(LLAMA, "swiglu"), "--swiglu is missing, without which Megatron's model is no"),
        ("pretrain_gpt.py", without(LLAMA, "RMSNorm"), "--RMSNorm is missing"),
        (
            "pretrain_gpt.py",
            [*LLAMA, "--use-rope-scaling", "--rotary-seq-len-interpolation-factor", "2"],
            "scale rotary positions by two rules",
        ),
        ("pretrain_llama.py", [*LLAMA, "--lr", "fast"], "--lr 'fast' is no number"),
        (
            "pretrain_llama.py",
            [*LLAMA, "--optimizer", "lamb"],
            "--optimizer lamb is not Megatron's; choose adam or sgd",
        ),
        ("pretrain_llama.py", ["7", *LLAMA], "'7' stands before the first flag"),
        ("pretrain_llama.py", [*LLAMA, "--data-path", "1", "a", "2"], "neither one prefix nor pairs"),
        ("pretrain_llama.py", without(LLAMA, "tokenizer-name-or-path"), "the tokenizer that made the data"),
        ("train.py", ["--task", "mnist"], "write it as a task"),
        ("train.py", ["--task", "bert"], "--task bert needs --config_file and --data"),
        ("train.py", [*HETSEQ], "is no configuration of a BERT"),
    ],
)
def test_what_has_no_counterpart_is_refused(script: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_command(script, words)


def test_other_scripts_are_left_alone(tmp_path: Path) -> None:
    assert map_command("train.py", ["--task", "segment"]) is None
    assert map_command("train.py", []) is None
    assert map_command("my.py", LLAMA) is None
    own = tmp_path / "pretrain_llama.py"
    own.write_text("import torch\n")
    assert map_command(str(own), LLAMA) is None
    own.write_text("from megatron import get_args\n")
    assert map_command(str(own), LLAMA) is not None


def test_the_recipe_is_shown_and_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from phalanx.launch import run

    asked: list[Any] = []
    monkeypatch.setattr(run, "train", lambda *given, **more: asked.append(given) or 7)
    shown.run_foreign_command("mine.py", LLAMA, None, None, {})
    with pytest.raises(typer.Exit) as left:
        shown.run_foreign_command("pretrain_llama.py", LLAMA, str(tmp_path / "run"), 2, {})
    assert left.value.exit_code == 7
    [(wanted, paths, ranks, *_)] = asked
    assert (wanted.train.steps, paths.root, ranks) == (1000, tmp_path / "run", 2)
    out = capsys.readouterr().out
    assert "# pretrain_llama.py as a recipe\nmodel:\n  layers: 32\n" in out
    assert "--job-name is passed over: metrics.jsonl has every step" in out
