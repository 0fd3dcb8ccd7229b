"""Frames and files as nobody sends or writes them who means well: what good ones become when parts of them are changed.

`examples(few)` is for hypothesis: so many examples in the suite, and as many as PHALANX_TEST_FUZZ says where it is set
(`make fuzz`).
"""

import copy
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

DEEPEST = 8
VARIABLE = "PHALANX_TEST_FUZZ"
ODD = (
    None, True, False, 0, 1, 2, 3, 7, -1, 255, 65535, 65536, 2**31, 2**32, 2**63, 2**64, 10**30, -(10**30), 0.5, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "0", "1", "cpu", "bare", "a" * 16, "0" * 16, "x" * 5000, "\ud800",
    "\0", "../../etc/passwd", "/dev/shm", "127.0.0.1", "localhost", "\x1b[2J", [], {}, [[]], [{}], {"": {}}, [0],
    [None], {"node": 1}, [1, 2, 3], -0.0,
)  # fmt: skip


def examples(few: int) -> settings:
    """Settings of a fuzzing test that tries a few examples, or as many as were asked for."""
    many = os.environ.get(VARIABLE)
    return settings(
        max_examples=int(many) if many else few, deadline=None, suppress_health_check=list(HealthCheck),
        database=None,
    )  # fmt: skip


def nested(depth: int, within: str) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = [tree] if within == "list" else {"a": tree}
    return tree


def values() -> st.SearchStrategy[Any]:
    """Any JSON value, the odd ones often."""
    small = st.recursive(
        st.sampled_from(ODD) | st.integers() | st.text(max_size=20) | st.floats(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    )
    deep = st.builds(nested, st.integers(1, 30), st.sampled_from(["list", "dict"]))
    # Copied, since whoever is given one may change it.
    return (st.sampled_from(ODD) | st.integers(0, 5) | small | deep).map(copy.deepcopy)


@st.composite
def changed(draw: st.DrawFn, trees: list[Any], most: int = 3) -> Any:
    """One of these trees of JSON values with up to so many places of it changed, left out or taken from elsewhere."""
    tree = copy.deepcopy(draw(st.sampled_from(trees)))
    for _ in range(draw(st.integers(0, most))):
        path = draw(st.sampled_from(paths(tree)))
        if not path:
            continue
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["change", "nearby", "drop", "add", "swap"]))
        old = parent[path[-1]]
        if how == "nearby" and type(old) is int:
            parent[path[-1]] = old + draw(st.sampled_from([-2, -1, 1, 2, 100, 2**16, 2**33]))
        elif how == "drop":
            del parent[path[-1]]
        elif how == "add":
            new = draw(values())
            if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = new
            else:
                parent.append(new)
        elif how == "swap":
            other = draw(st.sampled_from(trees))
            place = draw(st.sampled_from(paths(other)))
            for key in place:
                other = other[key]
            parent[path[-1]] = copy.deepcopy(other)
        else:
            parent[path[-1]] = draw(values())
    return tree


def paths(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value of a tree that is not too deep, the tree itself first."""
    found = [path]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if len(path) == DEEPEST:
        return found
    for key, value in pairs:
        found += paths(value, (*path, key))
    return found
