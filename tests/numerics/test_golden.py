"""The curve is the one that it was: what a recipe draws, orders, packs, masks and loses, against recorded values."""

import json

import pytest

from tests.numerics import golden

VALUES: dict[str, golden.Values] = json.loads(golden.FILE.read_text(encoding="utf-8"))
ROUNDING = 1e-12  # relative: libraries of other machines round otherwise


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, golden.Values]:
    return golden.compute(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("section", VALUES)
def test_the_curve_is_the_recorded_one(section: str, found: dict[str, golden.Values]) -> None:
    assert found.keys() == VALUES.keys()
    assert found[section].keys() == VALUES[section].keys()
    for name, recorded in VALUES[section].items():
        assert len(found[section][name]) == len(recorded), name
        if all(isinstance(value, int) for value in recorded):
            assert found[section][name] == recorded, name
        else:
            assert found[section][name] == pytest.approx(recorded, rel=ROUNDING, abs=0), name
