"""`tsm.transform`, and the names of that library that a script uses to speak of what it gives."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from phalanx.api.fsdp import init
from phalanx.api.fsdp.session import current_device, current_session
from phalanx.compat.sagemaker.context import transform_context
from phalanx.compat.sagemaker.moe import MoEConfig, heed_experts
from phalanx.compat.sagemaker.small import empty_module_params
from phalanx.compat.sagemaker.transformer_engine import heed_autocast
from phalanx.core.errors import ConfigError
from phalanx.models.counter_rng import derive_key
from phalanx.models.layers import RMSNorm
from phalanx.parallel import hf_state, hf_transform
from phalanx.parallel.hf_experts import transform_experts
from phalanx.parallel.tensor_layers import copy_shard

COMMUNICATIONS = {"p2p": "ring", "all_gather": "gather"}  # of context parallelism, by `parallel.context_by`


def transform(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | Mapping[str, Any] | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Divide a model's tensors over the ranks of a tensor parallel group, its experts over those of an expert parallel
    one, and its rows over those of a context parallel one, in place; gives the model back, to be wrapped in FSDP. It
    keeps its classes, its names and its weights.

    With context_parallel_degree N the script gives the model pieces r and 2 N - 1 - r of the 2 N of each row, r being
    `tsm.state.cp_rank`, and the same pieces of unshifted labels. The loss that the model returns is a rank's part times
    N: the mean over ranks is that of the rows. `cp_comm_type`: keys go from rank to rank while others are used, or at
    once.

    A model with a parameter on the meta device stays there, whatever `device` says. `load_state_dict_from_rank0`: rank
    0's weights count, and FSDP must have sync_module_states=True. Collective. Raises ConfigError before `tsm.init`, and
    for a configuration or a model that cannot be divided.
    """
    session = current_session()
    if session is None:
        raise ConfigError("tsm.transform shards a model over ranks; call tsm.init() first")
    if cp_comm_type not in COMMUNICATIONS:
        raise ConfigError(f"cp_comm_type is {cp_comm_type!r}; give {' or '.join(map(repr, COMMUNICATIONS))}")
    if config and not isinstance(config, MoEConfig):
        raise ConfigError(f"tsm.transform got config={config!r}, which is not supported; remove it")
    heed_experts(config if isinstance(config, MoEConfig) else None, model)
    split = transform_experts if session.sliced == "expert" else hf_transform.transform
    model = init.split_model(model, session, split, load_state_dict_from_rank0, device, dtype)
    if session.ranks.context > 1:
        transform_context(model, session.axis("context"), COMMUNICATIONS[cp_comm_type])
    heed_autocast(model, session.layers)
    return model


def setup_transformer_engine_cp_groups(*args: Any, **options: Any) -> None:
    """The groups are those of `tsm.transform`. Raises ConfigError where no model shares rows."""
    session = current_session()
    if session is None or session.ranks.context == 1 or "transform" not in session.done:
        raise ConfigError(
            "no model shares rows, so there are no groups for it; set context_parallel_degree in tsm.init, and call "
            "tsm.transform before"
        )


class _OfTransformed(type):
    """Makes `isinstance(x, TransformerLayer)` and the like true for parts of a transformed model, of any class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        session = current_session()
        if session is None:
            return False
        match cls.__name__:
            case "TransformerLMHead":
                return id(instance) in session.models
            case "MoELayer":
                return type(instance) in session.experts
        return type(instance) in session.layers


class TransformerLMHead(metaclass=_OfTransformed):
    """Any model that `tsm.transform` has given back."""


class TransformerLayer(metaclass=_OfTransformed):
    """Any layer of a model that `tsm.transform` has given back, such as for an `auto_wrap_policy`."""


class MoELayer(metaclass=_OfTransformed):
    """Any module of a model that `tsm.transform` has given back that has experts, and chooses among them."""


# ------------------------------------------------------------------------------------------------------------- delayed
# Parameters that get their values when FSDP has divided the model: each part's memory is taken when it is sharded.
# Draws depend on the seed and on a module's name alone: not on the rank, on how many there are, on the device or on the
# order in which modules come. So any number of ranks begins with the same weights.


logger = logging.getLogger("phalanx.sagemaker")
_NO_VALUE = {True: float("nan"), False: -987654321}  # of floats, of whole numbers: what no buffer holds


class DelayedParamIniter:
    """Gives the parameters of a `model` on the meta device their values, module by module, while FSDP wraps it.

    A model of Hugging Face says itself how its modules begin (`_init_weights`), and so do PyTorch's own modules
    (`reset_parameters`); `init_method_using_config(module)` takes the place of both. The seed is `random_seed` where
    that is set, else torch's.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: Callable[[nn.Module], object] | None = None,
        verbose: bool = False,
    ) -> None:
        session = current_session()
        self._model, self._custom, self._verbose = model, init_method_using_config, verbose
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._wanted = {(id(module), name) for module in model.modules() for name in _own(module)}
        self._done: set[tuple[int, str]] = set()
        self._seed = torch.initial_seed() if session is None or session.seed is None else session.seed
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        self._tied = [each for each in names.values() if len(each) > 1]
        self._ties_handled = False

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """What FSDP's `param_init_fn` takes."""
        return self._init

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """What FSDP's `post_param_init_fn` takes: ties weights again, where the model has `tie_weights`."""
        self._ties_handled = True
        return _tie

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> None:
        """Note that a module's own parameters, or only those given, have their values."""
        for name, parameter in module._parameters.items():
            if parameter is not None and (not args or any(parameter is each for each in args)):
                self._done.add((id(module), name))

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Raise AssertionError at the end of the block for a parameter that got no value, or what is on meta still."""
        yield
        if not enabled:
            return
        missing = sorted(f"{self._names[module]}.{name}".lstrip(".") for module, name in self._wanted - self._done)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise AssertionError(
                f"{len(missing)} of {len(self._wanted)} parameters got no values: {', '.join(missing[:3])}{more}; pass "
                "get_param_init_fn() to FSDP as param_init_fn"
            )
        for kind, tensors in (("parameter", self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, tensor in tensors:
                if tensor.is_meta:
                    raise AssertionError(f"{kind} {name} is still on the meta device")
        if self._verbose:
            logger.info("all %d parameters have their values", len(self._wanted))

    # ------------------------------------------------------------------------------------------------------ one module

    def _init(self, module: nn.Module) -> None:
        if self._tied and not self._ties_handled:
            raise ConfigError(
                f"{' and '.join(self._tied[0])} are tied and would become two parameters; give FSDP "
                "post_param_init_fn=initer.get_post_param_init_fn() as well"
            )
        with torch.no_grad():
            if self._custom is not None:
                self._custom(module)
            else:
                self._fill(module)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                raise AssertionError(
                    f"{self._name_of(module)}.{name} is still on the meta device after its module was initialized; "
                    "init_method_using_config must call empty_module_params(module, device)"
                )
        self.count_num_params(module)
        if self._verbose and module._parameters:
            logger.info("initialized %s", self._name_of(module) or "the model itself")

    def _name_of(self, module: nn.Module) -> str:
        return self._names.get(id(module), type(module).__name__)

    def _fill(self, module: nn.Module) -> None:
        """As the model says, on the host, so that draws are those of any device; then moved."""
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if not any(tensor is not None and tensor.is_meta for tensor in tensors):
            return
        host = torch.device("cpu")
        empty_module_params(module, host)
        slices = hf_state.shards_of(module)
        for name, part in slices.items():  # what is drawn is the whole, so that slices are those of one model
            old = module.get_parameter(name)
            module._parameters[name] = nn.Parameter(torch.empty(part.shape, dtype=old.dtype), old.requires_grad)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype.is_floating_point:
                parameter.fill_(float("nan"))  # which no rule leaves
        marked = [name for name, each in module._buffers.items() if each is not None and each.is_meta]
        for name in marked:
            module._buffers[name] = _marked(module._buffers[name])
        self._draw(module)
        self._check_drawn(module)
        for name in marked:
            if _is_marked(module._buffers[name]):
                raise ConfigError(
                    f"buffer {self._name_of(module)}.{name} is on the meta device, and {type(module).__name__} does "
                    "not define its values; build the model with buffers on a device (accelerate's "
                    "init_empty_weights), or pass init_method_using_config"
                )
        for name, part in slices.items():
            module._parameters[name] = copy_shard(module.get_parameter(name), part)
        module._apply(lambda tensor: tensor.to(current_device()), recurse=False)

    def _check_drawn(self, module: nn.Module) -> None:
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.numel() or not bool(parameter.isnan().all()):
                continue
            if not isinstance(module, RMSNorm):
                raise ConfigError(
                    f"{self._name_of(module)}.{name} is a parameter without an initialization in the model; pass "
                    "init_method_using_config"
                )
            parameter.fill_(1.0)

    def _draw(self, module: nn.Module) -> None:
        name = self._name_of(module)
        parent = self._modules.get(name.rpartition(".")[0]) if name else None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_key(self._seed, name) & (2**63 - 1))
            self._first_values(name, module)
            if parent is not None and parent is not self._model and not _own(parent):
                # A block may change what a layer in it has begun with (GPT-2 scales the last of each by the depth).
                torch.default_generator.manual_seed(derive_key(self._seed, name, "block") & (2**63 - 1))
                with _set_aside(parent, module):
                    self._by_owner(name, parent)

    def _first_values(self, name: str, module: nn.Module) -> None:
        if self._by_owner(name, module):
            return
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"{type(module).__name__} ({name or 'the model'}) has no initialization: neither it has "
                "reset_parameters nor the model _init_weights; pass init_method_using_config"
            )
        reset()

    def _by_owner(self, name: str, module: nn.Module) -> bool:
        """Have the innermost model around a module initialise it; False where there is none that knows how."""
        parts = name.split(".")
        for count in range(len(parts), -1, -1):
            owner: Any = self._modules.get(".".join(parts[:count]))
            init: Any = getattr(owner, "_init_weights", None)
            if init is not None:
                init(module)
                return True
        return False


@contextlib.contextmanager
def _set_aside(block: nn.Module, but: nn.Module) -> Iterator[None]:
    """Let nothing of a block be changed but one module, whose draws then do not depend on what is there already."""
    others = [each for each in block.modules() if each is not but]
    kept = [each._parameters for each in others]
    for each in others:
        each._parameters = {
            name: None
            if parameter is None
            else nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            for name, parameter in each._parameters.items()
        }
    try:
        yield
    finally:
        for each, parameters in zip(others, kept, strict=True):
            each._parameters = parameters


def _own(module: nn.Module) -> list[str]:
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def _marked(old: torch.Tensor | None) -> torch.Tensor:
    assert old is not None
    floats = old.dtype.is_floating_point
    return torch.full_like(old, _NO_VALUE[floats] if old.dtype not in (torch.bool, torch.uint8) else 0, device="cpu")


def _is_marked(tensor: torch.Tensor | None) -> bool:
    assert tensor is not None
    if tensor.dtype in (torch.bool, torch.uint8) or not tensor.numel():
        return bool(tensor.numel())  # whether it was given a value is unknown
    if tensor.dtype.is_floating_point:
        return bool(tensor.isnan().all())
    return bool((tensor == _NO_VALUE[False]).all())


def _tie(module: nn.Module) -> None:
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
