"""Make a cluster from `hardware.json`: kinds of the catalog with measured speeds."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from phalanx.core.device_peaks import find_peaks
from phalanx.core.errors import ConfigError
from phalanx.layout import hardware
from phalanx.layout.balance import UNBOUND, Speed
from phalanx.layout.hardware import Hardware, MeasuredDevice
from phalanx.layout.model_shape import LATENT_WIDTHS, LatentSpec, ModelSpec, MoESpec
from phalanx.models.families.catalog import DEFAULT_FAMILY, FAMILIES
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.cost import CostModel
from phalanx.planner.device_catalog import DEFAULT_CONSTANTS, DEVICE_KINDS, GIB, RANGES, CostConstants, DeviceKind
from phalanx.planner.layout_choice import LayoutChoice
from phalanx.planner.work import WIDTH, StepWork, find_ffn_widths, find_head_widths

CALLS_AT_MOST = 2.0  # times as fast that a CPU may be without what its calls take
FALLBACK_KIND = "A100-40GB"  # substitute for an unknown accelerator, at the measured speed
# Ratio of times up to which neighbours of one model on a node count as equal: short measurements differ by that much,
# and devices that differ by design (fractions of a CPU) by more.
ALIKE = 1.25
ALIKE_MEMORY = 1.02  # ratio of the memories of two devices that count as equal
# Of the model that was measured, without which its passes say nothing of another one's.
SHAPES = ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab_size", "positions", "head_dim")
MOE_SHAPES = ("moe_experts", "moe_experts_per_token", "moe_intermediate")
MAY_BE_ZERO = ("moe_shared", *LATENT_WIDTHS)


def cluster_from_hardware(found: Hardware, constants: CostConstants = DEFAULT_CONSTANTS) -> ClusterSpec:
    """Make a cluster from the devices of a hardware file, equal neighbours grouped. Raises ConfigError for a file of a
    custom network, whose work cannot be compared, and for invalid shapes or memories."""
    on_host = any(device.host_to_device_bytes_per_s is None for device in found.devices)
    work, passes = _work_of(found.work, on_host), single_device_choice(found.work)
    for device in found.devices:
        if device.memory_bytes < 1:
            raise ConfigError(
                f"the hardware file says that device {device.rank} has no memory, so nothing fits there; give its "
                "memory_bytes, or measure again with `phalanx hardware`"
            )
    devices = _measured_like(found.devices)
    speeds = _speeds(devices)
    kinds: list[DeviceKind] = []
    for same in _alike(devices, speeds):
        lines = [speeds[device.rank] for device in same]
        mean = Speed(fmean(line.sequence_s for line in lines), fmean(line.fixed_s for line in lines))
        carries = [device.carries_s_per_byte for device in same if device.carries_s_per_byte is not None]
        least = replace(
            same[0], memory_bytes=min(device.memory_bytes for device in same),
            carries_s_per_byte=fmean(carries) if carries else None,
        )  # fmt: skip
        kinds += [_kind(least, mean, work, passes, constants)] * len(same)
    if found.learnt is not None and found.learnt.update is not None:
        kinds = [replace(kind, update=found.learnt.update) for kind in kinds]
    groups = group_devices([device.node for device in found.devices], kinds)
    return _linked(ClusterSpec(groups), found, constants)


def _measured_like(devices: Sequence[MeasuredDevice]) -> list[MeasuredDevice]:
    """With the times of another one of its model, of its node if there is one, for each that could not be measured."""
    known: dict[tuple[str, int | None], tuple[tuple[int, float], ...]] = {}
    for device in reversed(devices):
        if device.times:
            known[device.model, device.node] = known[device.model, None] = device.times
    found = []
    for device in devices:
        elsewhere = known.get((device.model, None), ())
        found.append(replace(device, times=device.times or known.get((device.model, device.node), elsewhere)))
    return found


def _speeds(devices: Sequence[MeasuredDevice]) -> list[Speed]:
    """As `hardware.speeds` has them, but in seconds also where devices of some models have no times; of these any."""
    known = [device for device in devices if device.times]
    lines = hardware.fit_speeds(
        Hardware({}, tuple(replace(device, rank=number) for number, device in enumerate(known)), None)
    )
    found = {device.rank: line for device, line in zip(known, lines, strict=True)}
    return [found.get(device.rank, Speed(1.0)) for device in devices]


def constants_from_hardware(found: Hardware, start: CostConstants = DEFAULT_CONSTANTS) -> CostConstants:
    """The constants updated by a run's measurements, within plausible ranges."""
    if found.learnt is None or found.learnt.host_s is None:
        return start
    least, most = RANGES["step_s"]
    return replace(start, step_s=min(most, max(least, found.learnt.host_s)))


def group_devices(nodes: Sequence[int], kinds: Sequence[DeviceKind]) -> tuple[NodeGroup, ...]:
    """Devices in order of rank, by the node and the kind of each: neighbours alike together."""
    groups: list[NodeGroup] = []
    before = None
    for (node, kind), same in itertools.groupby(
        zip(nodes, _distinguish_kinds(kinds), strict=True), lambda one: (one[0], one[1])
    ):
        count = len(list(same))
        last = groups[-1] if groups else None
        if last is not None and node != before and not last.shares_node and (last.kind, last.per_node) == (kind, count):
            groups[-1] = replace(last, nodes=last.nodes + 1)
        else:
            groups.append(NodeGroup(1, count, kind, shares_node=node == before))
        before = node
    return tuple(groups)


def _distinguish_kinds(kinds: Sequence[DeviceKind]) -> list[DeviceKind]:
    """Merge kinds of one name, with their least memory; those with other memories get separate names."""
    memories: dict[str, list[int]] = {}
    for kind in sorted(kinds, key=lambda kind: kind.memory_bytes):
        known = memories.setdefault(kind.name, [])
        if not known or kind.memory_bytes > ALIKE_MEMORY * known[-1]:
            known.append(kind.memory_bytes)
    first: dict[tuple[str, int], DeviceKind] = {}
    found = []
    for kind in kinds:
        known = memories[kind.name]
        least = max(each for each in known if each <= kind.memory_bytes)
        name = kind.name if len(known) == 1 else f"{kind.name} with {least / GIB:.3g} GiB"
        found.append(first.setdefault((kind.name, least), replace(kind, name=name, memory_bytes=least)))
    return found


def _alike(devices: Sequence[MeasuredDevice], speeds: Sequence[Speed]) -> Iterator[list[MeasuredDevice]]:
    """Neighbours on a node that are of one model and take about as long, together, since noise is no difference: as one
    they can be slices of a model."""
    same: list[MeasuredDevice] = []
    for device in devices:
        together = [*same, device]
        size = min(each.times[-1][0] if each.times else 1 for each in together)
        took = [speeds[each.rank].seconds(size, 1) for each in together]
        if max(took) > ALIKE * min(took) or (device.node, device.model) != (together[0].node, together[0].model):
            yield same
            same = []
        same.append(device)
    yield same


def _work_of(work_record: dict[str, Any], on_host: bool = False) -> StepWork:
    """The work of the measured pass of one sequence; `on_host`: by CPUs, which compute a mixed dtype in fp32."""
    if any(name not in work_record for name in (*SHAPES, "dtype")) or work_record["dtype"] not in (*WIDTH, "mixed"):
        raise ConfigError(
            "the hardware file was measured with a custom network, which says nothing about other models; "
            "measure with a recipe of a built-in model, or give --cluster"
        )
    window, full = work_record.get("sliding_window"), work_record.get("full_attention_layers") or []
    names = SHAPES + (MOE_SHAPES if "moe_experts" in work_record else ())
    sizes = {name: work_record.get(name) for name in names} | ({} if window is None else {"sliding_window": window})
    sizes |= {name: work_record[name] for name in MAY_BE_ZERO if name in work_record}
    wrong = [
        name
        for name, value in sizes.items()
        if type(value) is not int or not (name not in MAY_BE_ZERO) <= value <= UNBOUND
    ]
    dense = work_record.get("moe_dense_layers", [])
    for name, layers in (("full_attention_layers", full), ("moe_dense_layers", dense)):
        if not isinstance(layers, list | tuple) or any(type(layer) is not int for layer in layers):
            wrong.append(name)
    if wrong:
        raise ConfigError(
            f"the hardware file is damaged, since of the model that was measured {' and '.join(wrong)} cannot be what "
            "it says; measure again with `phalanx hardware`, or give --cluster"
        )
    moe = None
    if "moe_experts" in work_record:
        moe = MoESpec(
            experts=work_record["moe_experts"],
            experts_per_token=work_record["moe_experts_per_token"],
            intermediate=work_record["moe_intermediate"],
            dense_layers=tuple(dense),
            shared=work_record.get("moe_shared", 0),
        )
    has_latent = sizes.keys() >= set(LATENT_WIDTHS)
    latent = LatentSpec(**{name: work_record[name] for name in LATENT_WIDTHS}) if has_latent else None
    spec = ModelSpec(
        vocab_size=work_record["vocab_size"], hidden=work_record["hidden"], layers=work_record["layers"],
        heads=work_record["heads"], kv_heads=work_record["kv_heads"], head_dim=work_record["head_dim"],
        intermediate=work_record["intermediate"], max_seq_len=work_record["positions"], latent=latent,
    )  # fmt: skip
    widths = find_ffn_widths(work_record["layers"], work_record["intermediate"], moe)
    options = FAMILIES.get(str(work_record.get("architecture")), DEFAULT_FAMILY).options
    return StepWork(
        layers=work_record["layers"], hidden=work_record["hidden"], heads=work_record["heads"],
        kv_heads=work_record["kv_heads"], **widths, vocabulary=work_record["vocab_size"],
        seq_len=work_record["positions"], global_batch=1,
        tied=bool(work_record.get("tie_embeddings")), gated=options.gated, biases=options.biases,
        **find_head_widths(spec), embedding_width=work_record.get("embedding_width") or 0,
        precision=work_record["dtype"] if work_record["dtype"] != "mixed" else "fp32" if on_host else "fp16",
        window=window or 0, full_layers=sum(layer < work_record["layers"] for layer in full),
        both_ways=not options.causal,
    )  # fmt: skip


def single_device_choice(work_record: dict[str, Any]) -> LayoutChoice:
    """The layout of the measured passes: one device, with the recipe's recomputation."""
    again = work_record.get("activations")
    return LayoutChoice(
        recompute="full" if again in ("full", "offload") else "selective" if again == "selective" else "none"
    )


def _kind(
    device: MeasuredDevice, speed: Speed, work: StepWork, passes: LayoutChoice, constants: CostConstants
) -> DeviceKind:
    """A known kind with the device's own memory, and as fast as its line of times says: at the most sequences that were
    tried; a CPU also with what each operation takes besides, by a pass of the fewest."""
    base = match_device(device)
    kind = replace(base, memory_bytes=device.memory_bytes, carries_s_per_byte=device.carries_s_per_byte)
    if device.host_to_device_bytes_per_s is not None:
        kind = replace(kind, host_bytes_per_s=device.host_to_device_bytes_per_s)
    if not device.times:
        return kind
    if work.precision not in base.flop_per_s:
        work = replace(work, precision="fp32")
    few, size = device.times[0][0], device.times[-1][0]
    few_s, took_s = speed.seconds(few, 1), speed.seconds(size, 1)

    def thought_s(kind: DeviceKind, sequences: int) -> float:
        alone = CostModel(replace(work, global_batch=sequences), ClusterSpec((NodeGroup(1, 1, kind),)), constants)
        return alone.estimate(replace(passes, micro_batch=sequences)).terms["compute"]

    times, call_s = thought_s(base, size) / took_s, 0.0
    if base.on_host and few < size:
        # Two passes tell two numbers; a speed far from that of the large one would be noise.
        more = (thought_s(base, size) - thought_s(base, few)) / (took_s - few_s)
        faster = min(max(more, times), CALLS_AT_MOST * times)
        of_calls_s = max(0.0, took_s - thought_s(base, size) / faster)
        times, call_s = faster, of_calls_s / (thought_s(replace(base, call_s=1.0), few) - thought_s(base, few))
    return replace(kind.scale_speed(times), call_s=call_s, name=f"{base.name} at {times:.3g} of its speed")


def match_device(device: MeasuredDevice) -> DeviceKind:
    """The kind that a device's maker calls it, the one with the nearest memory of several; a CPU; or LIKE."""
    return match_device_name(device.model, device.host_to_device_bytes_per_s is None, device.memory_bytes)


def match_device_name(model: str, on_host: bool, memory_bytes: int) -> DeviceKind:
    """The kind of a device of which only name and memory are known."""
    if on_host:
        return DEVICE_KINDS["CPU"]
    memory_bytes = max(1, memory_bytes)  # 0 from a node that did not report it
    near = min(
        _find_named_kind(model) or [DEVICE_KINDS[FALLBACK_KIND]],
        key=lambda kind: abs(math.log(kind.memory_bytes / memory_bytes)),
    )
    return replace(near, flop_per_s=find_peaks(model) or near.flop_per_s)  # of a PCIe card they are others


def has_data_sheet(model: str) -> bool:
    """Whether an accelerator that its maker calls so has a data-sheet here."""
    return bool(_find_named_kind(model))


def _find_named_kind(model: str) -> list[DeviceKind]:
    words = set(re.split(r"[\s_-]+", model.upper()))
    return [
        kind
        for kind in DEVICE_KINDS.values()
        if not kind.on_host and words >= {part for part in kind.name.split("-") if not part.endswith("GB")}
    ]


def _linked(cluster: ClusterSpec, found: Hardware, constants: CostConstants) -> ClusterSpec:
    """A cluster whose network, or links of its only node, give the measured time of an all-reduce by
    `link_cost.reduce_scatter_s`: each of n nodes, or of the ranks of one, passes on 2 (n - 1) / n of the bytes."""
    if found.link is None:
        return cluster
    rate, latency, count = found.link.bytes_per_s, found.link.latency_s, cluster.devices
    if found.link.busy_latency_s is not None and count > 1:
        # Round a ring and round again, as gloo's all-reduce goes: 2 (n - 1) times somebody waits for another one.
        later_s = max(0.0, found.link.busy_latency_s - latency) / (2 * (count - 1))
        cluster = replace(cluster, busy_hop_s=later_s)
    share = 2 * (1 - 1 / count) if count > 1 else 1.0
    if cluster.nodes > 1:
        bits = 8 * 2 * (1 - 1 / cluster.nodes) * rate / constants.far_share
        return replace(cluster, between_bits_per_s=bits, between_latency_s=latency / (2 * cluster.nodes))
    bytes_per_s, latency_s = share * rate / constants.near_share, latency / (2 * count)
    kinds = [replace(each.kind, link_bytes_per_s=bytes_per_s, link_latency_s=latency_s) for each in cluster.groups]
    groups = (replace(group, kind=kind) for group, kind in zip(cluster.groups, kinds, strict=True))
    return replace(cluster, groups=tuple(groups))
