"""Weights, and Adam's state, of Megatron-LM and Megatron-LLaMA checkpoints under Phalanx's names, with tensor and
pipeline ranks merged.

Layout: `latest_checkpointed_iteration.txt` names `iter_0000100` or `release`, in which `mp_rank_TT[_PPP]` of tensor
rank TT and pipeline rank PPP holds `model_optim_rng.pt` (or `model_rng.pt`), a pickled dictionary: `args`, and `model`,
or `model0`, `model1`, ... of virtual stages. A stage numbers its own layers from 0; virtual stage v of rank p comes
after stage v of all lower ranks and after all of v - 1. Sources: megatron.training.checkpointing,
megatron.core.models.gpt, and Megatron-LLaMA's megatron.model.transformer and llama_model.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.compat.megatron.args import GROUPS, MegatronOverrides, MegatronTensorFacts, build_spec
from phalanx.compat.megatron.files import IDLE, LazyTensor, RankFile, find_iteration, rank_files, read_file
from phalanx.compat.megatron.optimizer_state import KINDS, read_states
from phalanx.compat.megatron.torch_dist import is_torch_dist, read_torch_dist
from phalanx.core.errors import ConfigError
from phalanx.models.hf_weights import DTYPES

# A part of a stage -> what it is called by Megatron-core, and by what came before it.
_OF_LAYER = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "input_norm.weight"),
    "qkv": ("self_attention.linear_qkv.weight", "self_attention.query_key_value.weight"),
    "o": ("self_attention.linear_proj.weight", "self_attention.dense.weight"),
    "mlp_norm": (
        "mlp.linear_fc1.layer_norm_weight",
        "post_attention_layernorm.weight",
        "post_attention_norm.weight",
        "pre_mlp_layernorm.weight",
    ),
    "fc1": ("mlp.linear_fc1.weight", "mlp.dense_h_to_4h.weight"),
    "fc2": ("mlp.linear_fc2.weight", "mlp.dense_4h_to_h.weight"),
}
_OF_MODEL = {
    "embed": ("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight"),
    "norm": ("decoder.final_layernorm.weight", "language_model.encoder.final_layernorm.weight",
             "language_model.encoder.final_norm.weight"),
    "head": ("output_layer.weight", "language_model.output_layer.weight", "word_embeddings_for_head.weight"),
    "lm_head": ("lm_head.weight",),  # Megatron-LLaMA's, whole on every tensor rank
}  # fmt: skip
_PARTS_OF_LAYER = {name: part for part, names in _OF_LAYER.items() for name in names}
_PARTS_OF_MODEL = {name: part for part, names in _OF_MODEL.items() for name in names}
_LAYER = re.compile(r"(?:decoder|language_model\.encoder)\.layers\.(\d{1,6})\.(.+)")
# Names of the first versions: what they were called later.
_OLD = (("language_model.transformer.", "language_model.encoder."), (".attention.", ".self_attention."))
_WHY = {
    r"expert|router": "a mixture of experts",
    r"\.bias$|layer_norm_bias$": "a bias",
    r"position_embeddings": "learned positions",
    r"[qk]_(layer)?norm": "a norm of queries and keys",
}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor where it is stored: one tensor rank's part."""

    stored: LazyTensor
    key: str
    path: Path

    @property
    def tensor(self) -> Tensor:
        """It itself, read or mapped."""
        return self.stored.load()

    def __str__(self) -> str:
        return f"{self.path} holds {self.key} of shape {self.stored.shape}"


StoredParts = dict[str, list[_StoredTensor]]  # "qkv.3", "embed", ... -> the part of each tensor rank


class MegatronCheckpoint:
    """The weights of a checkpoint by our names, mapped and merged as they are asked for.

    `folder` is the one with `latest_checkpointed_iteration.txt`, or one of its iterations, of ranks' files or
    distributed (`torch_dist`). Nothing but tensors and plain values is unpickled, and everything is checked at once.
    `spec` is the model's shape, `dtype` the narrowest type that holds all tensors as they are, `iteration` what the
    files say, `stale` whether they hold parameters that lag the optimizer by a step. With `moments` Adam's state is
    read as well; `has_moments` says whether it is there. Raises ConfigError, one sentence with file and key, for what
    is missing, unknown, damaged or of another size than the rest.
    """

    def __init__(self, folder: Path, overrides: MegatronOverrides | None = None, moments: bool = False) -> None:
        grid, files = _read_files(find_iteration(Path(folder)), moments)
        ranks, stages = len(grid[0]), len(grid)
        first, where = files[0][0], str(grid[0][0])
        self.iteration: int | None = first.iteration
        for row, paths in zip(files, grid, strict=True):
            for file, path in zip(row, paths, strict=True):
                if file.iteration != first.iteration or len(file.chunks) != len(first.chunks):
                    raise ConfigError(
                        f"{path} is of iteration {file.iteration} with {len(file.chunks)} virtual stages, but {where} "
                        f"of {first.iteration} with {len(first.chunks)}; use all files of one checkpoint."
                    )
        self.args = first.args
        _check_grid(self.args or {}, ranks, stages, where)
        self._ranks, self._grid = ranks, grid
        self._parts: StoredParts = {}
        self._states: dict[str, StoredParts] = {}  # of the optimizer, by kind
        self._stage_of: dict[int, list[Path]] = {}  # layer -> the files of its tensor ranks
        self._core = False
        layers = 0
        for chunk in range(len(first.chunks)):
            for row, paths in zip(files, grid, strict=True):
                for kind in KINDS if all(file.states for file in row) else ():
                    states = [file.states[kind][chunk] for file in row if file.states]
                    self._add(states, paths, layers, self._states.setdefault(kind, {}))
                layers += self._add([file.chunks[chunk] for file in row], paths, layers, self._parts)
        tied = self._is_tied()
        self._check_present(layers, tied)
        self.spec, self._qkv = build_spec(
            self.args, overrides or MegatronOverrides(), self._tensor_facts(layers, tied), where
        )
        self.has_moments = all(file.states for row in files for file in row)
        for parts in (self._parts, *(self._states.values() if self.has_moments else ())):
            self._check_shapes(parts)
        self.dtype = self._common_dtype()
        self.stale = bool((self.args or {}).get("overlapped_distributed_optimizer")) and first.iteration != 0

    def tensor(self, name: str, kind: str | None = None) -> Tensor:
        """Our parameter `name` in its shape and stored type, a view of the files where one part is all of it; or what
        the optimizer keeps of it as `kind`."""
        spec, every = self.spec, self._parts if kind is None else self._states[kind]
        if name in ("embed.weight", "head.weight"):
            where = name.removesuffix(".weight")
            if where == "head" and "lm_head" in every:
                return every["lm_head"][0].tensor[: spec.vocab_size]
            return _join(every[where], 0)[: spec.vocab_size]
        if name == "head.norm.weight":
            return every["norm"][0].tensor
        found = re.fullmatch(r"layers\.(\d+)\.(?:attention\.|mlp\.)?(\w+)\.weight", name)
        assert found, name
        layer, what = found[1], found[2]
        if what in ("attention_norm", "mlp_norm"):
            return every[f"{what}.{layer}"][0].tensor
        if what in ("o", "down"):
            return _join(every[f"{'o' if what == 'o' else 'fc2'}.{layer}"], 1)
        if what in ("gate", "up"):
            half = 0 if what == "gate" else 1
            return _cat([held.tensor.chunk(2)[half] for held in every[f"fc1.{layer}"]], 0)
        return _cat([self._cut(held.tensor, what) for held in every[f"qkv.{layer}"]], 0)

    def _cut(self, fused: Tensor, what: str) -> Tensor:
        """The queries, keys or values ("q", "k", "v") of one tensor rank."""
        heads, kv_heads, width = self.spec.heads // self._ranks, self.spec.kv_heads // self._ranks, self.spec.head_dim
        each = heads // kv_heads
        if self._qkv == GROUPS:
            groups = fused.view(kv_heads, each + 2, width, self.spec.hidden)
            start, count = {"q": (0, each), "k": (each, 1), "v": (each + 1, 1)}[what]
            return groups[:, start : start + count].reshape(-1, self.spec.hidden)
        return fused.split([heads * width, kv_heads * width, kv_heads * width])["qkv".index(what)]

    # ---------------------------------------------------------------------------------------------- finding, checking

    def _add(self, stage: list[dict[str, LazyTensor]], paths: list[Path], layers: int, into: StoredParts) -> int:
        """Take in one stage, by tensor rank, that follows `layers` layers; returns how many it has."""
        count = 0
        for rank, (tensors, path) in enumerate(zip(stage, paths, strict=True)):
            for key, tensor in tensors.items():
                if IDLE.fullmatch(key):
                    continue
                part, own = _part_of(key, path)
                self._core |= key.startswith(("decoder.", "embedding."))
                count = max(count, own + 1)
                held = into.setdefault(part if own < 0 else f"{part}.{layers + own}", [])
                if len(held) != rank:
                    raise ConfigError(
                        f"{path} holds {key}, which {held[-1].path} has as {held[-1].key}; use a checkpoint that was "
                        "saved by one version of Megatron."
                        if len(held) > rank
                        else f"{paths[len(held)]} lacks {key}, which {path} has; use all files of one checkpoint."
                    )
                held.append(_StoredTensor(tensor, key, path))
        self._stage_of |= dict.fromkeys(range(layers, layers + count), paths)
        return count

    def _is_tied(self) -> bool:
        """Whether the head is the embedding. Raises ConfigError where a head is stored and the arguments deny it."""
        untied = (self.args or {}).get("untie_embeddings_and_output_weights")
        if "lm_head" in self._parts:
            return False
        if "head" not in self._parts or "embed" not in self._parts:
            # Stages have a copy of the embedding for the head, so that without one a head is missing.
            return not untied and (untied is False or len(self._grid) == 1)
        if untied:
            return False
        pairs = list(zip(self._parts["head"], self._parts["embed"], strict=False))
        same = all(torch.equal(head.tensor, embed.tensor) for head, embed in pairs)
        copy = pairs[0][0]
        if not same and (untied is False or copy.key.startswith("word_embeddings_for_head")):
            raise ConfigError(
                f"{copy.path} holds {copy.key} for a head tied to the embedding, but with different values than "
                f"{pairs[0][1].key} in {pairs[0][1].path}; use all files of one checkpoint."
            )
        return same

    def _check_present(self, layers: int, tied: bool) -> None:
        first, last = self._grid[0], self._grid[-1]
        if not layers:
            raise ConfigError(f"{first[0]} holds no layers under a known name; use another checkpoint.")
        needed = [("embed", first)]
        needed += [(f"{part}.{layer}", self._stage_of[layer]) for layer in range(layers) for part in _OF_LAYER]
        needed += [("norm", last)] + ([] if tied or "lm_head" in self._parts else [("head", last)])
        for part, paths in needed:
            present = len(self._parts.get(part, []))
            if present < self._ranks:
                name, _, layer = part.partition(".")
                called = (_OF_LAYER | _OF_MODEL)[name][0 if self._core else 1]
                of = f" of layer {layer} of the whole model" if layer else ""
                raise ConfigError(
                    f"{paths[present]} lacks {called}{of}, so the model is incomplete; download the file again, or "
                    "use another checkpoint."
                )

    def _tensor_facts(self, layers: int, tied: bool) -> MegatronTensorFacts:
        def rows(part: str, dim: int = 0) -> int:
            held = self._parts[part]
            if any(len(one.stored.shape) != 2 for one in held):
                raise ConfigError(f"{held[0]}, which is not a matrix; download the checkpoint again.")
            return sum(one.stored.shape[dim] for one in held)

        return MegatronTensorFacts(
            rows=rows("embed"),
            hidden=rows("embed", 1) // self._ranks,
            layers=layers,
            intermediate=rows("fc2.0", 1),
            qkv_rows=rows("qkv.0"),
            tied=tied,
            core=self._core,
            lm_head="lm_head" in self._parts,
        )

    def _check_shapes(self, parts: StoredParts) -> None:
        spec, ranks = self.spec, self._ranks
        for name, value in (("heads", spec.heads), ("kv_heads", spec.kv_heads), ("intermediate", spec.intermediate)):
            if value % ranks:
                raise ConfigError(
                    f"{self._parts['qkv.0'][0].path} is one of {ranks} tensor ranks, which cannot share {name} "
                    f"{value} evenly; give --heads and --kv-heads as used in training."
                )
        padded = self._tensor_facts(spec.layers, spec.tie_embeddings).rows
        qkv_rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        shapes = {
            "embed": (padded // ranks, spec.hidden),
            "head": (padded // ranks, spec.hidden),
            "lm_head": (padded, spec.hidden),
            "qkv": (qkv_rows // ranks, spec.hidden),
            "o": (spec.hidden, spec.heads * spec.head_dim // ranks),
            "fc1": (2 * spec.intermediate // ranks, spec.hidden),
            "fc2": (spec.hidden, spec.intermediate // ranks),
        }
        for part, every in parts.items():
            needed = shapes.get(part.partition(".")[0], (spec.hidden,))
            for held in every:
                if held.stored.shape != needed:
                    raise ConfigError(
                        f"{held}, but the rest of the checkpoint implies {needed} on each of {ranks} tensor ranks; "
                        "use a LLaMA (a gated MLP) and all files of one checkpoint."
                    )

    def _common_dtype(self) -> torch.dtype:
        common = self._parts["embed"][0].stored.dtype
        for held in (held for every in self._parts.values() for held in every):
            if held.stored.dtype not in DTYPES.values():
                raise ConfigError(
                    f"{held.path} stores {held.key} as {held.stored.dtype}, which cannot be trained; save the "
                    f"checkpoint with one of: {', '.join(DTYPES)}."
                )
            common = torch.promote_types(common, held.stored.dtype)
        return common


def _read_files(folder: Path, moments: bool) -> tuple[list[list[Path]], list[list[RankFile]]]:
    """The files of an iteration, by pipeline and tensor rank, and what is in them; a distributed one is a single
    file."""
    if is_torch_dist(folder):
        return [[folder]], [[read_torch_dist(folder)]]
    grid = rank_files(folder)
    files = [[read_file(path) for path in row] for row in grid]
    if moments:
        files = [
            [
                replace(file, states=read_states(path, file.chunks, file.args or {}))
                for file, path in zip(row, paths, strict=True)
            ]
            for row, paths in zip(files, grid, strict=True)
        ]
    return grid, files


def _join(parts: list[_StoredTensor], dim: int) -> Tensor:
    return _cat([held.tensor for held in parts], dim)


def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _part_of(key: str, path: Path) -> tuple[str, int]:
    """Which part `key` is, and of which of the stage's own layers (-1: of none)."""
    name = key
    for old, new in _OLD:
        name = name.replace(old, new)
    layer = _LAYER.fullmatch(name)
    part = _PARTS_OF_MODEL.get(name) if layer is None else _PARTS_OF_LAYER.get(layer[2])
    if part is not None:
        return part, -1 if layer is None else int(layer[1])
    reason = next((f"{why}, which" for pattern, why in _WHY.items() if re.search(pattern, key)), "which")
    raise ConfigError(f"{path} holds {key}, {reason} LLaMA models do not have; use a LLaMA checkpoint.")


def _check_grid(args: dict[str, Any], ranks: int, stages: int, where: str) -> None:
    for name, found in (("tensor_model_parallel_size", ranks), ("pipeline_model_parallel_size", stages)):
        if args.get(name) not in (None, found):
            raise ConfigError(
                f"{where} was saved with {name} {args[name]!r}, but {found} are present; download all mp_rank "
                "folders of the checkpoint."
            )
