"""The trainer against its plain twin: the loop that everybody writes, with torch's optimizer, clipping and loss."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from phalanx.data.loader import Loader
from phalanx.data.packing import PackingOptions, make_rows
from phalanx.data.record_files import TokenFile
from phalanx.layout.balance import Division
from phalanx.models.counter_rng import CounterRNG
from phalanx.models.families.catalog import parameter_shapes
from phalanx.models.llama import Llama, init_slice
from phalanx.optim.lr_schedule import learning_rate
from phalanx.tasks.language import CausalLMTask
from phalanx.tasks.task import Task
from phalanx.trainer.setup import TrainingJob
from tests.numerics import runs


def plain_loop(job: TrainingJob, masked: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms before clipping and final parameters by name, in float64."""
    config, optim = job.config, job.config.optim
    model = Llama(job.spec).double()
    parameters = dict(model.named_parameters())
    for name, shape in parameter_shapes(job.spec).items():
        values = init_slice(job.spec, config.train.seed, name, 0, parameters[name].numel(), "cpu", torch.float64)
        parameters[name].data.copy_(values.view(shape))
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    [(folder, weight)] = job.train_tokens
    rows = make_rows(TokenFile(folder), PackingOptions(config.data.seq_len), 0)
    loader = Loader([(rows, weight)], config.train.global_batch, 0, 0)
    task: Task = CausalLMTask(config.data.seq_len)
    task = runs.Masked(task) if masked else task
    losses, norms = [], []
    for step in range(1, config.train.steps + 1):
        batch = task.collate(loader.batches(step - 1, Division((config.train.global_batch,), 1))[0])
        logits = model(batch.inputs["tokens"], draws=CounterRNG(config.train.seed, step, batch.samples))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.inputs["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), optim.clip_norm or float("inf"))
        for group in adam.param_groups:
            group["lr"] = learning_rate(optim, step)
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms, {f"param/{name}": p.detach().flatten() for name, p in parameters.items()}


@pytest.mark.parametrize(("tied", "masked"), [(False, False), (True, False), (False, True)])
def test_the_trainer_walks_the_curve_of_a_plain_loop(tied: bool, masked: bool, tokens: Path, tmp_path: Path) -> None:
    ours = runs.walk(1, tmp_path, tokens, model__tie_embeddings=tied, masked=masked)
    losses, norms, parameters = plain_loop(runs.job(tmp_path, tokens, {"model.tie_embeddings": tied}, 1), masked)
    ours.state = {name: tensor for name, tensor in ours.state.items() if name.startswith("param/")}
    apart = (
        runs.farthest(ours.losses, losses),
        runs.farthest(ours.norms, norms),
        runs.distance(ours.state, parameters, "param"),
    )
    print("farthest apart: losses {:.1e}, norms {:.1e}, parameters {:.1e}".format(*apart))
    assert max(apart) < 1e-9
