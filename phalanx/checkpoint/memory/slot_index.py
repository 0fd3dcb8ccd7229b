"""What lies where in a slot of a rank's state file: it can be read on any layout, and used as it is on the same."""

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.checkpoint.disk.snapshot import DTYPE_NAMES
from phalanx.checkpoint.memory.previous_state import read_tensor
from phalanx.comm.mesh import Mesh
from phalanx.optim.quantized import QuantizedShard
from phalanx.optim.state import Slot, StatePiece
from phalanx.recovery import state_file
from phalanx.recovery.state_file import ALIGNED, StateFile, round_up


def build_index(like: Slot, pieces: Iterable[StatePiece], mesh: Mesh) -> tuple[dict[str, Any], int, int]:
    """What lies where in a slot, and its bytes; all that must be alike for a slot to be used as it is. Besides, a
    number that ranks with the same pieces have in common, and no others."""
    tensors: list[list[Any]] = []
    places: dict[int, int] = {}
    end = 0
    for key, state in like.items():
        for kind, tensor in state.items():
            tensors.append([key, kind, DTYPE_NAMES[tensor.dtype], list(tensor.shape), end])
            places[id(tensor)] = end
            end += round_up(tensor.numel() * tensor.dtype.itemsize, ALIGNED)
    rows = [_row(piece, places) for piece in pieces]
    # What no piece speaks of may be like nothing else.
    spoken = {row["at"] for row in rows} | {row["codes"] for row in rows if "codes" in row}
    whole = spoken == set(places.values()) and bool(rows)
    known = state_file.digest_json([tensors, rows, None if whole else mesh.rank])
    who = [mesh.world, mesh.axes.tensor, mesh.axes.pipeline]
    # As many bits as a float64 holds.
    return {"who": who, "tensors": tensors, "pieces": rows}, end, int.from_bytes(known[:6], "little")


def _row(piece: StatePiece, places: Mapping[int, int]) -> dict[str, Any]:
    """A piece in the index, by where in a slot its tensors lie."""
    row: dict[str, Any] = {"name": piece.name, "kind": piece.kind, "start": piece.start, "stop": piece.stop}
    if piece.window is not None:
        row["window"] = list(piece.window)
    row["dtype"] = DTYPE_NAMES[piece.dtype]
    if isinstance(piece.values, QuantizedShard):
        codes, scales = piece.values.codes, piece.values.scales
        row |= {"codes": places[id(codes)], "shape": list(codes.shape), "signed": piece.values.signed}
        return row | {"at": places[id(scales)]}
    return row | {"at": places[id(piece.values)]}


def map_slot(file: StateFile, slot: int, index: Mapping[str, Any]) -> Slot:
    """The tensors of a slot."""
    found: Slot = {}
    for key, kind, dtype, shape, at in index["tensors"]:
        found.setdefault(key, {})[kind] = read_tensor(file, slot, at, dtype, shape)
    return found
