"""Text generation with a model that is split over several ranks: each token is a forward pass through all of them.

It has no key-value cache, so a token takes as long as a pass over all tokens before it: this is for checking a model
that no single device can hold. If one device is enough, transformers is faster (text.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from phalanx.checkpoint.disk.load import agree_on_newest
from phalanx.comm.mesh import Mesh
from phalanx.comm.rendezvous import JsonGroup
from phalanx.core.errors import RunError
from phalanx.core.run_paths import RunPaths
from phalanx.layout.model_shape import ModelSpec
from phalanx.models.model import StagedArchitecture
from phalanx.parallel.model_part import ModelPart, partition_model
from phalanx.parallel.parallelize import precision_of
from phalanx.workload.step import compute_next_logits
from phalanx.workload.workload import make_workload

if TYPE_CHECKING:
    from phalanx.config.schema import Config
from phalanx.workload.expert_counts import find_expert_counts


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of a token; `temperature` 0 takes the most likely one. `top_k` 0 samples from all."""

    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def sample_token(self, logits: Tensor, seen: Tensor, generator: torch.Generator) -> int:
        """The next token, from its `logits` (V,) and the previous tokens `seen` (S,)."""
        if self.temperature == 0:
            return int(self._penalize_repetition(logits, seen).argmax())
        return int(torch.multinomial(self.token_probabilities(logits, seen), 1, generator=generator))

    def token_probabilities(self, logits: Tensor, seen: Tensor) -> Tensor:
        """The probability of each token (V,), computed as in transformers: penalty, temperature, top_k and top_p
        in this order."""
        ordered, tokens = (self._penalize_repetition(logits, seen) / self.temperature).sort(descending=True)
        if self.top_k:
            ordered, tokens = ordered[: self.top_k], tokens[: self.top_k]
        found = ordered.softmax(0)
        # Tokens whose more likely predecessors sum to less than top_p; this always includes the most likely token.
        found = found.masked_fill(found.cumsum(0) - found >= self.top_p, 0.0)
        return torch.zeros(len(logits)).index_put_((tokens,), found / found.sum())

    def _penalize_repetition(self, logits: Tensor, seen: Tensor) -> Tensor:
        logits = logits.to("cpu", torch.float32, copy=True)
        before, factor = logits[seen], self.repetition_penalty
        logits[seen] = torch.where(before < 0, before * factor, before / factor)
        return logits


@dataclass(frozen=True)
class DistributedModel:
    """A model of which this rank has a part."""

    model: StagedArchitecture
    model_part: ModelPart
    mesh: Mesh

    def next_token(self, tokens: Sequence[int], sampling: SamplingOptions, generator: torch.Generator) -> int:
        """The token after `tokens`, the same on all ranks. Collective."""
        text = torch.tensor(tokens, device=self.mesh.device)
        with torch.no_grad():
            if self.model_part.pipeline is None:
                logits = self.model(text[None])[0, -1]
            else:
                logits = compute_next_logits(self.model, text[None], self.model_part.pipeline)
        token = 0
        if self.model_part.reports_loss:
            assert logits is not None
            token = sampling.sample_token(logits, text.cpu(), generator)
        return int(self.mesh.sum([float(token)])[0])

    def close(self) -> None:
        if self.model_part.pipeline is not None:
            self.model_part.pipeline.close()


def load_distributed_model(config: "Config", spec: ModelSpec, paths: RunPaths, mesh: Mesh) -> DistributedModel:
    """Load this rank's part of the model in a run's newest checkpoint, by byte range; in the layout of `config`,
    whatever the layout of the run. Collective. Raises RunError if there is no checkpoint."""
    model, precision = make_workload(config, spec, paths).model(), precision_of(config.train.dtype, mesh)
    parted = partition_model(model, config, mesh, precision, find_expert_counts(config, spec))
    assert isinstance(model, StagedArchitecture)
    checkpoint = agree_on_newest(
        paths.checkpoints, mesh.rank, JsonGroup(mesh.checkpoint), None, lambda kind, what: None
    )
    if checkpoint is None:
        raise RunError(f"{paths.display_name} has no checkpoint that can be read, so there is no model; train it first")
    read = parted.make_reader(checkpoint.read_into)
    for name, empty in list(model.named_parameters()):
        # As in training, in which routers do not round them.
        dtype = precision.master if name.endswith(".router.correction") else precision.compute
        values = torch.empty(empty.numel(), dtype=dtype, device=mesh.device)
        read(name, "param", 0, values.numel(), values)
        owner, _, leaf = name.rpartition(".")
        held = nn.Parameter(values.view(empty.shape), requires_grad=False)
        model.get_submodule(owner).register_parameter(leaf, held)
    checkpoint.close()
    return DistributedModel(model.eval(), parted, mesh)
