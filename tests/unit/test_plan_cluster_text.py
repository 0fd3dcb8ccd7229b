"""Clusters, times and amounts as a person writes them; a mistake is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.durations import parse_duration
from phalanx.core.errors import ConfigError
from phalanx.planner import parse_cluster
from phalanx.planner.cluster import ClusterSpec, NodeGroup
from phalanx.planner.device_catalog import DEVICE_KINDS


def groups(text: str) -> list[tuple[int, int, str]]:
    return [(group.nodes, group.per_node, group.kind.name) for group in parse_cluster.parse_cluster(text).groups]


def test_nodes_of_devices_and_the_network_between_them() -> None:
    found = parse_cluster.parse_cluster("4x(8xA100-80GB), 2x(8xV100-32GB), 200Gb/s")
    assert [(g.nodes, g.per_node, g.kind.name) for g in found.groups] == [(4, 8, "A100-80GB"), (2, 8, "V100-32GB")]
    assert found.between_bits_per_s == 200e9
    assert found.devices == 48


def test_devices_without_brackets_are_of_one_node() -> None:
    assert groups("8xH100-80GB") == [(1, 8, "H100-80GB")]
    assert groups("T4") == [(1, 1, "T4")]
    assert groups("3x(T4)") == [(3, 1, "T4")]
    assert groups("2 x ( 4 x rtx 4090 )") == [(2, 4, "RTX-4090")]
    assert groups("2\N{MULTIPLICATION SIGN}(4*T4)") == [(2, 4, "T4")]


@pytest.mark.parametrize(
    ("words", "bits"),
    [
        ("100Gb/s", 100e9),
        ("25Gbit/s", 25e9),
        ("25GBit/s", 25e9),
        ("25 GBits/s", 25e9),
        ("12.5GB/s", 100e9),
        ("12.5GByte/s", 100e9),
        ("12.5 gbytes/s", 100e9),
        ("1 Tb/s", 1e12),
        ("1gbps", 1e9),
        ("900Mb/s", 9e8),
    ],
)
def test_speeds_in_bits_and_bytes(words: str, bits: float) -> None:
    assert parse_cluster.parse_cluster(f"2x(8xA100-80GB), {words}").between_bits_per_s == pytest.approx(bits)


def test_a_latency() -> None:
    assert parse_cluster.parse_cluster("2x(8xT4), 10Gb/s, 20us").between_latency_s == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("", 0, "the text is empty"),
        ("4x(8xA100-80GB", 14, "not closed"),
        ("4x(8xA100-80GB), 2x(8xA1000)", 22, "no kind of device is called 'A1000'; known are V100-16GB"),
        ("4x(8xA100-80GB),", 16, "nothing follows the comma"),
        ("4x(8xA100-80GB) 2xT4", 16, "a comma or the end"),
        ("4x(8x)", 5, "a kind of device is expected"),
        ("4(8xT4)", 1, "an x with a kind of device"),
        ("4x8xT4", 2, "devices of several nodes need brackets"),
        ("4x(8xA100-8OGB)", 5, "did you mean A100-80GB?"),
        ("8xRTX-4O90", 2, "did you mean RTX-4090?"),
        ("0x(8xT4)", 0, "0 nodes are not possible"),
        ("0xT4", 0, "0 devices are not possible"),
        ("4x(0xT4)", 3, "0 devices are not possible"),
        ("200Gb/s", 0, "no devices"),
        ("8xT4, 1Gb/s, 2Gb/s", 13, "given before"),
        ("8xT4, 0Gb/s", 6, "carries nothing"),
        ("9999999xT4", 0, "digit too many"),
        ("8xT4, -1Gb/s", 6, "a kind of device is expected"),
        ("9" * 5000 + "xT4", 0, "digit too many"),
        ("2x(" + "9" * 5000 + "xT4)", 3, "digit too many"),
        ("8xT4, 200b/s", 6, "a network below 1 kb/s; its unit must be another one"),
        ("8xT4 200Gb/s", 5, "a comma or the end"),
        ("8xA100 80GB 2xT4", 12, "a comma or the end"),
        ("2x(8xT4 200Gb/s)", 8, "the bracket that was opened is not closed here"),
        ("8xH100 PCIe", 2, "no kind of device is called 'H100 PCIe'"),
        ("8xT4, " + "9" * 400 + "Gb/s", 6, "digit too many"),
        ("8xT4, " + "9" * 400 + "ms", 6, "digit too many"),
    ],
)
def test_a_mistake_is_pointed_at(text: str, at: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster.parse_cluster(text)
    sentence, line, caret = str(caught.value).split("\n")
    assert words in sentence
    assert f"character {at + 1}:" in sentence
    assert line == f"  {text}"
    assert caret == f"  {' ' * at}^"


@pytest.mark.parametrize(
    ("text", "at", "shown", "column"),
    [
        ("8xT4,\u3000\x1b8A40", 6, "8xT4,  8A40", 6),  # neither can be printed
        ("\N{FULLWIDTH DIGIT EIGHT}xT4, \u663e\u5361", 6, "\N{FULLWIDTH DIGIT EIGHT}xT4, \u663e\u5361", 7),
    ],
)
def test_a_mistake_is_pointed_at_behind_odd_characters(text: str, at: int, shown: str, column: int) -> None:
    """A wide one takes two columns."""
    with pytest.raises(ConfigError) as caught:
        parse_cluster.parse_cluster(text)
    sentence, line, caret = str(caught.value).split("\n")
    assert f"character {at + 1}:" in sentence
    assert (line, caret) == (f"  {shown}", f"  {' ' * column}^")


def test_a_latency_has_either_mu() -> None:
    for mu in "\N{MICRO SIGN}\N{GREEK SMALL LETTER MU}u":
        assert parse_cluster.parse_cluster(f"2x(8xT4), 10Gb/s, 20{mu}s").between_latency_s == pytest.approx(20e-6)


def test_an_unknown_kind_says_what_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"numbers are needed: .*memory.*links.*phalanx hardware.*--hardware"):
        parse_cluster.parse_cluster("8xMI300X")


@given(
    st.text(alphabet="0123456789xX(), ABCGHTVabms/-.\t", max_size=30)
    | st.lists(
        st.sampled_from(
            ["4x", "(", ")", "T4", "A100", ",", " ", "10Gb/s", "5\u03bcs", "2\u212ab/s", "3u\u017f", "٣x", "x"]
        )
        | st.text(max_size=2),
        max_size=9,
    ).map("".join)
)
def test_any_text_is_a_cluster_or_a_sentence(text: str) -> None:
    try:
        devices, lines = parse_cluster.parse_cluster(text).devices, 3
    except ConfigError as error:
        devices, lines = 1, len(str(error).split("\n"))
    assert devices > 0
    assert lines == 3


parts = st.builds(NodeGroup, st.integers(1, 99), st.integers(1, 16), st.sampled_from(list(DEVICE_KINDS.values())))


@given(st.lists(parts, min_size=1, max_size=4), st.sampled_from([1e9, 25e9, 200e9, 1.6e12]))
def test_what_is_written_is_read_again(there: list[NodeGroup], speed: float) -> None:
    cluster = ClusterSpec(tuple(there), speed)
    again = parse_cluster.parse_cluster(parse_cluster.format_cluster(cluster))
    assert again.groups == cluster.groups
    assert cluster.nodes == 1 or again.between_bits_per_s == pytest.approx(speed)


def test_nodes_alike_are_one_group_wherever_they_are_written() -> None:
    """So that a plan does not try them one by one."""
    there = parse_cluster.parse_cluster("8xT4, 2x(8xA40), 8xT4, 4xT4, 3x(8xT4), 25Gb/s")
    assert parse_cluster.format_cluster(there.merge_alike_groups()) == "5x(8xT4), 2x(8xA40), 4xT4, 25Gb/s"
    assert there.merge_alike_groups().merge_alike_groups() == there.merge_alike_groups()
    beside = ClusterSpec(
        (
            NodeGroup(1, 2, DEVICE_KINDS["T4"]),
            NodeGroup(1, 1, DEVICE_KINDS["A40"], shares_node=True),
            NodeGroup(1, 2, DEVICE_KINDS["T4"]),
        )
    )
    assert beside.merge_alike_groups() == beside


def test_a_node_more() -> None:
    there = parse_cluster.parse_cluster("2x(8xT4), 8xA40")
    assert parse_cluster.format_cluster(parse_cluster.add_nodes(there, 0, 1)) == "3x(8xT4), 8xA40, 100Gb/s"
    assert parse_cluster.format_cluster(parse_cluster.add_nodes(there, 1, -1)) == "2x(8xT4), 100Gb/s"


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("45min", 2700), ("3h", 10800), ("2d", 172800), ("1.5 h", 5400), ("90\u017f", 90)]
)
def test_times(text: str, value: float) -> None:
    assert parse_duration(text, "--mtbf") == value


@pytest.mark.parametrize(
    "text", ["", "3", "h", "-3h", "0s", "3 parsecs", "nan", "9" * 400 + "d", "9" * 40 + "d", "0.0000000001s"]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--mtbf .* 45min"):
        parse_duration(text, "--mtbf")


@pytest.mark.parametrize(
    ("text", "value"), [("300B", 3e11), ("1.4T", 1.4e12), ("300e9", 3e11), ("5000", 5000.0), ("2m", 2e6)]
)
def test_amounts(text: str, value: float) -> None:
    assert parse_cluster.parse_amount(text, "--tokens") == value


@pytest.mark.parametrize("text", ["", "many", "-1", "0", "nan", "inf", "3Q", "1e300"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tokens .* 1\.4T"):
        parse_cluster.parse_amount(text, "--tokens")
