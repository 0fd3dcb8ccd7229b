"""Which activations are kept for the backward pass, and which are computed again."""

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(units: Sequence[nn.Module]) -> None:
    """Make each unit keep only its inputs and compute the rest again in the backward pass (Chen et al. 2016).

    The forward method is replaced in place, so that names of parameters stay as they are. Nothing needs the state of a
    random generator: dropout draws by coordinates, and draws the same again.
    """
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False)
