"""What these tests ask of the accelerator of this machine, which may be the simulated one (tests/accelerator).

Asking torch here would initialise a driver in the test process alone; the ranks are forked from another.
"""

import pytest
import torch

HERE = torch.accelerator.is_available()
_kind = torch.accelerator.current_accelerator() if HERE else None
SIMULATED = _kind is not None and _kind.type == "sim"
needs_accelerator = pytest.mark.skipif(not HERE, reason="no accelerator on this machine")
needs_compiler = pytest.mark.skipif(SIMULATED, reason="torch's compiler makes no code for the simulated device")
needs_kernels = pytest.mark.skipif(SIMULATED, reason="the simulated device has no attention kernels of its own")
