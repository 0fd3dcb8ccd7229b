"""Checkpoints of HetSeq, one file of torch.save: {args, model, optimizer_history, extra_state, last_optimizer_state}.

`model` has the parameters of a BERT by Hugging Face's names, but for the layers that join a matrix with its activation,
which are called `dense_act`. Source: HetSeq's bert_modeling and checkpoint_utils.
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from phalanx.compat.pickles import load_pickled
from phalanx.compat.trained_state import ModelFolder, TrainedState, check_parameter, list_few
from phalanx.core.errors import ConfigError
from phalanx.models.user_model import hf_name

_NEXT = "cls.seq_relationship.weight"  # of the head that says which text is next


def open_hetseq(path: Path, model: ModelFolder) -> TrainedState:
    """The parameters in a checkpoint of HetSeq by our names. Its Adam state is numbered in HetSeq's internal order, and
    not read.

    Raises ConfigError, with the file and key, for a damaged file, one that would run code, and parameters that are
    missing, unknown or of other sizes.
    """
    content = load_pickled(path)
    held = content.get("model") if isinstance(content, dict) else None
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise ConfigError(f"{path} holds no dictionary of tensors under model, so it is not a checkpoint of HetSeq")
    tensors = {_rename(key): (key, tensor) for key, tensor in held.items()}
    encoder = model.spec.encoder
    if encoder is not None and encoder.objective == "masked" and _NEXT in tensors:  # config.json does not tell
        model = replace(model, spec=replace(model.spec, encoder=replace(encoder, objective="masked-next")))
    shapes = model.shapes()
    names = {name: hf_name(name, model.model_class) for name in shapes}
    missing = [name for name in names.values() if name not in tensors]
    known = {*names.values(), *(other for name in names.values() for other in model.model_class.other_hf_names(name))}
    extra = [
        key for name, (key, _) in tensors.items() if name not in known and not model.model_class.ignores_hf_name(name)
    ]
    for lacking, what in ((missing, "lacks"), (extra, "holds")):
        if lacking:
            raise ConfigError(
                f"{path} {what} {list_few(lacking)}, which does not fit the config.json of {model.folder}; "
                "give that of the trained model"
            )
    for name, theirs in names.items():
        key, tensor = tensors[theirs]
        check_parameter(key, tuple(tensor.shape), tensor.dtype, shapes[name], path)
    dtype = next(iter(tensors.values()))[1].dtype
    return TrainedState(model, lambda name, kind: tensors[names[name]][1], dtype, None, False)


def _rename(key: str) -> str:
    return key.removeprefix("module.").replace(".dense_act.", ".dense.")
