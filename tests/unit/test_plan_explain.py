"""`phalanx plan --explain`: every key of a recipe has an answer, be it that a plan does not reckon with it."""

from pathlib import Path

import pytest

from phalanx.config import load
from phalanx.config.schema import iter_knobs
from phalanx.core.errors import ConfigError
from phalanx.planner import advice, parse_cluster, tables
from phalanx.planner.advice import PlanQuery
from phalanx.planner.plan import Plan
from phalanx.planner.plan_file import prediction_record
from phalanx.planner.recipe_keys import free_layout, keys_of
from tests.helpers import ROOT
from tests.unit.test_plan_command import phalanx, planned

LLAMA_1B = ROOT / "recipes" / "llama-3.2-1b.yaml"
DEMO = ROOT / "recipes" / "demo.yaml"
# Values other than the demo's, of the keys that a plan reckons with.
COUNTS = {
    "model.preset": "llama-3.2-1b", "model.vocab_size": "4096", "model.hidden": "384", "model.layers": "8",
    "model.heads": "12", "model.kv_heads": "2", "model.head_dim": "64", "model.intermediate": "1024",
    "model.tie_embeddings": "false", "model.architecture": "qwen2", "model.dropout": "0.1",
    "model.attention_dropout": "0.1",
    "data.tokenizer_vocab": "2000", "data.seq_len": "512", "data.format": "chat", "data.isolate_documents": "true",
    "train.global_batch": "32", "train.micro_batch": "2", "train.dtype": "fp32", "train.fp8": "block",
    "optim.name": "sgd", "optim.double_buffer": "true",
    "parallel.engine": "fsdp2", "parallel.zero": "3", "parallel.grad_reduce": "per_micro_batch",
    "parallel.shard_degree": "2", "parallel.sequence_parallel": "false", "parallel.pipeline": "2",
    "parallel.context": "2",
    "balance.batch": "even", "balance.optimizer_state": "even", "balance.hardware": "hardware.json",
    "memory.activations": "full", "memory.offload_prefetch_blocks": "3", "comm.compress": "bf16",
    "checkpoint.every": "3", "resilience.in_memory_checkpoints": "false", "resilience.replicate_every": "off",
}  # fmt: skip
# Of those that it does not.
IGNORED = {
    "model.max_seq_len": "512", "model.rope_theta": "5000", "model.norm_eps": "1e-4",
    "model.init_std": "0.1", "model.rope_scaling.factor": "4", "model.rope_scaling.low_freq_factor": "2",
    "model.rope_scaling.high_freq_factor": "8", "model.rope_scaling.original_max_seq_len": "128",
    "model.rope_scaling.rule": "linear", "model.rope_scaling.beta_fast": "16", "model.rope_scaling.beta_slow": "2",
    "model.rope_scaling.attention_factor": "1.5",
    "data.source": "[a.txt]", "data.tokenizer": "folder", "data.text_key": "x", "data.validation": "{more: a.txt}",
    "data.messages_key": "x", "data.prompt_key": "x", "data.completion_key": "x",
    "data.held_out": "0.2", "data.mask_document_end": "true", "data.cache": "folder", "data.workers": "2",
    "data.read_ahead": "2",
    "train.steps": "7", "train.stop_after": "3h", "train.stop_every": "5", "train.rampup_batch": "[4, 4, 64]",
    "train.epochs": "2", "train.seed": "5", "train.compile": "true", "train.eval_every": "3", "train.patience": "3",
    "train.eval_sequences": "5", "train.loss_scale": "8", "train.loss_scale_growth_interval": "7",
    "train.fp8_history": "3", "train.fp8_margin": "1",
    "train.profile": "2-3", "train.memory_snapshot": "3", "train.tf32": "true", "train.deterministic": "true",
    "optim.lr": "1e-5", "optim.beta1": "0.5", "optim.beta2": "0.5", "optim.eps": "1e-5", "optim.weight_decay": "0.5",
    "optim.clip_norm": "3", "optim.schedule": "linear", "optim.power": "2", "optim.warmup_steps": "7",
    "optim.decay_steps": "50", "optim.min_lr_ratio": "0.3",
    "parallel.layout": "auto", "comm.timeout_s": "5", "checkpoint.best": "true", "checkpoint.keep": "5",
    "resilience.max_restarts": "5", "resilience.max_identical_failures": "5", "resilience.on_lost_node": "[wait]",
    "resilience.wait_for_node_s": "5", "resilience.rejoin_nodes": "false", "resilience.heartbeat_timeout_s": "5",
    "resilience.stop_notice_s": "60", "resilience.preemption_notice": "gcp", "resilience.metadata_url": "http://h:1",
    "resilience.storage_timeout_s": "5", "resilience.health": "off", "resilience.hang_timeout_s": "50",
    "resilience.on_nan": "stop", "resilience.on_spike": "stop", "resilience.spike_factor": "5",
    "resilience.rollback_steps": "5", "resilience.checksum_every": "5",
    "callback.code": "mine.py", "report.wandb": "project", "report.prometheus": "9420",
    "report.webhook": "hook", "report.tensorboard": "false", "storage.private": "true",
}  # fmt: skip
# Of those that the demo cannot have by themselves: for other models and tasks, or beside other keys.
REFUSED = {
    "model.from_hf": "folder", "model.code": "mine.py", "model.sliding_window": "64",
    "model.moe.experts": "4", "model.moe.experts_per_token": "2", "model.moe.intermediate": "64",
    "model.moe.renormalize": "false", "model.moe.dense_layers": "[0]", "model.moe.balance": "none",
    "model.moe.balance_weight": "0.1", "model.moe.over": "model", "model.moe.z_loss": "0.1",
    "model.moe.bias_rate": "0.1", "model.moe.group": "2",
    "model.lora.adapter": "folder", "model.lora.rank": "4", "model.lora.alpha": "8", "model.lora.dropout": "0.1",
    "model.lora.targets": "[q]",
    "task.kind": "masked", "task.code": "mine.py", "task.options": "{a: 1}", "task.mask_share": "0.3",
    "task.whole_word": "true", "task.next_sentence": "true", "task.labels": "[a, b]",
    "data.tokens_key": "x", "data.tags_key": "x", "data.label_key": "x", "data.pair_key": "x",
    "data.chat_template": "x", "data.loss_on": "all", "data.too_long": "drop",
    "callback.options": "{a: 1}",
    "optim.options": "{momentum: 0.9}", "optim.decay_share": "0.5", "optim.decay_shape": "sqrt",
    "parallel.tensor": "2", "parallel.schedule": "interleaved", "parallel.layers_per_stage": "[1, 3]",
    "parallel.context_by": "ring", "balance.context": "[3, 1]",
    "parallel.expert": "2", "balance.experts": "[3, 1]", "model.latent": "[0, 12, 4, 6]", "model.moe.scale": "2",
    "model.moe.shared": "1", "model.moe.groups": "2", "model.moe.groups_per_token": "2",
}  # fmt: skip
# The demo made so large that unlike devices are worth it.
LARGER = ("model.hidden=768", "model.heads=12", "model.kv_heads=6", "train.global_batch=512",
          "--cluster", "2xA100-40GB, 2xV100-16GB")  # fmt: skip
QUESTION = PlanQuery(free_layout(load.load_recipe(DEMO), []), None, ())
THERE = parse_cluster.parse_cluster("2xA100-40GB, 2xV100-16GB, 10Gb/s")


@pytest.fixture(scope="module")
def best() -> Plan:
    return QUESTION.search(THERE).best


def test_every_key_is_asked_about() -> None:
    asked = [*COUNTS, *IGNORED, *REFUSED]
    assert len(asked) == len(set(asked))
    assert set(asked) == {key for key, _ in iter_knobs() if not key.startswith(("slurm.", "k8s."))}


@pytest.mark.parametrize("key", COUNTS)
def test_a_key_that_counts_is_weighed_token_for_token(key: str, best: Plan) -> None:
    told = advice.explain_key(QUESTION, THERE, best, f"{key}={COUNTS[key]}")
    assert told["fits"] and told["counts"]
    plan = told.pop("plan")
    assert told["slower"] == pytest.approx(best.effective_tokens_per_s / plan.effective_tokens_per_s - 1)
    if abs(told["slower"]) > 1e-4:
        # The part that is named takes more of a token where the wish is slower, and less where it is faster.
        names = [name for name, words in advice.TERM_NAMES.items() if told["why"].startswith(words)]
        if names:
            theirs, ours = (each.estimate.terms[names[0]] / each.estimate.step_s for each in (plan, best))
            per_token = theirs / plan.estimate.tokens_per_s - ours / best.estimate.tokens_per_s
            assert per_token * told["slower"] > 0
        else:
            assert "failures take" in told["why"]
    asked = told | {"keys": keys_of(plan, QUESTION.config), "expected": prediction_record(plan)}
    record = {"explain": asked, "expected": prediction_record(best), "saving": {"goodput": best.goodput}}
    assert tables.render_explanation(record)


@pytest.mark.parametrize("key", [*IGNORED, "slurm.partition", "k8s.image"])
def test_a_key_that_a_plan_does_not_reckon_with_is_said_to_be_none(key: str, best: Plan) -> None:
    told = advice.explain_key(QUESTION, THERE, best, f"{key}={IGNORED.get(key, 'long')}")
    assert (told["fits"], told["counts"]) == (True, False)


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_the_recipe_cannot_have_is_a_sentence(key: str, best: Plan) -> None:
    with pytest.raises(ConfigError) as caught:
        advice.explain_key(QUESTION, THERE, best, f"{key}={REFUSED[key]}")
    assert key.rpartition(".")[0] in str(caught.value) and len(str(caught.value)) < 600


def test_what_changes_nothing_is_said_so(tmp_path: Path) -> None:
    words = (DEMO, "--cluster", "2xCPU", "--out", tmp_path / "plan.json", "--explain", "optim.lr=1e-5")
    assert "optim.lr=1e-5 changes nothing that a plan reckons with" in phalanx("plan", *words).output


# ------------------------------------------------------------------------------------------------- held by the command


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (["balance.batch=even"], {"balance.batch": [256] * 2}),  # the slower two would hold the others up
        (["balance.batch=[128, 128, 128, 128]"], {"balance.batch": [128] * 4}),
        (
            ["balance.batch=[200, 190, 122]", "parallel.tensor=1", "parallel.pipeline=1"],
            {"balance.batch": [200, 190, 122]},
        ),
        (["balance.batch=[200, 150, 100, 62]"], {"balance.batch": [200, 150, 100, 62]}),
        (["balance.batch=[200, 150, 100, 62]", "train.micro_batch=400"], {"train.micro_batch": 400}),  # twice as large
        (
            ["balance.optimizer_state=[4, 3, 2, 1]", "parallel.pipeline=1"],
            {"balance.optimizer_state": [0.4, 0.3, 0.2, 0.1]},
        ),
        (["parallel.pipeline=2", "parallel.layers_per_stage=[1, 3]"], {"parallel.layers_per_stage": [1, 3]}),
        (
            ["parallel.schedule=interleaved", "parallel.pipeline=2", "parallel.layers_per_stage=[1, 1, 1, 1]"],
            {"parallel.schedule": "interleaved", "parallel.layers_per_stage": [1, 1, 1, 1]},
        ),
        (
            ["parallel.tensor=2", "parallel.sequence_parallel=false"],
            {"parallel.tensor": 2, "parallel.sequence_parallel": False},
        ),
        (["parallel.tensor=2"], {"parallel.tensor": 2, "parallel.sequence_parallel": True}),
        (
            ["parallel.engine=fsdp2"],
            {"parallel.engine": "fsdp2", "parallel.zero": "auto", "parallel.grad_reduce": "auto"},
        ),
        (["parallel.engine=single"], {"parallel.engine": "single", "parallel.tensor": 1}),
        (["parallel.engine=sharded", "--cluster", "1xA100-40GB"], {"parallel.engine": "sharded"}),
        (["comm.compress=bf16", "--cluster", "1xA100-40GB"], {"parallel.engine": "sharded"}),  # which alone compresses
        (["--cluster", "1xA100-40GB"], {"parallel.engine": "single"}),
    ],
)
def test_what_the_command_line_says_is_held(words: list[str], held: dict[str, object]) -> None:
    where = [*LARGER[:-2], *words] if "--cluster" in words else [*words, *LARGER]
    overrides, (_, cluster) = where[:-2], where[-2:]
    question = PlanQuery(free_layout(load.load_recipe(DEMO, overrides), overrides), None, tuple(overrides))
    found = keys_of(question.search(parse_cluster.parse_cluster(cluster)).best, question.config)
    assert {key: found[key] for key in held} == held


def test_layers_of_interleaved_chunks_count_where_they_are(tmp_path: Path) -> None:
    """A rank has every second of four chunks: the longest rank decides, and equal ranks are as fast as even chunks."""
    words = ("parallel.schedule=interleaved", "parallel.pipeline=2", "--cluster", "8xA100-40GB")
    step_s = {
        stages: planned(tmp_path / "plan.json", LLAMA_1B, f"parallel.layers_per_stage={stages}", *words)["expected"][
            "step_s"
        ]
        for stages in ("auto", "[4, 4, 4, 4]", "[1, 7, 7, 1]", "[7, 1, 7, 1]")
    }
    assert step_s["auto"] == step_s["[4, 4, 4, 4]"] == step_s["[1, 7, 7, 1]"]
    assert step_s["[7, 1, 7, 1]"] > 1.1 * step_s["auto"]


def test_even_shares_of_unlike_devices_cost_what_waiting_costs(tmp_path: Path) -> None:
    words = ("parallel.tensor=1", "parallel.pipeline=1", "--explain", "balance.batch=even")
    told = planned(tmp_path / "plan.json", DEMO, *words, *LARGER)
    assert told["keys"]["balance.batch"][0] > 1.5 * told["keys"]["balance.batch"][3]
    assert told["explain"]["slower"] > 0.05
