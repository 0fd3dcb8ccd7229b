"""The benchmark of data in miniature: both ways make the same tokens, and every claim has its figure."""

import json
from pathlib import Path

import pytest

from benchmarks import data, harness


def test_compares_the_same_tokens_and_claims_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"text": f"def f{i}(self): return {i} * self.x  # {'again ' * (i % 7)}"} for i in range(300)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    talks = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * (i % 9)}]}
             for i in range(200)]  # fmt: skip
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    monkeypatch.setattr(data, "TEXT", str(tmp_path / "text.jsonl"))
    monkeypatch.setattr(data, "CHAT", str(tmp_path / "chat.jsonl"))
    monkeypatch.setattr(data, "VOCAB", 300)
    monkeypatch.setattr(data, "SHAPES", ((32, 2),))
    rows, checks = data.tokenising(tmp_path, copies=1, turns=2)
    assert [row["way"] for row in rows] == ["the library's encode_batch_fast", "phalanx data prepare"]
    assert rows[0]["tokens"] == rows[1]["tokens"] > 1000
    assert all(row["MB/s"] > 0 for row in rows)
    more, more_checks = data.loading(tmp_path, turns=3)
    assert [(row["loader"], row["sequence"]) for row in more] == [("text", 32), ("chat, packed", 32)]
    outcome = harness.result("data", harness.machine(None, 2), [*rows, *more], [*checks, *more_checks])
    harness.report(outcome, tmp_path / "result.json")
    written = json.loads((tmp_path / "result.json").read_text())
    assert [check["target"] for check in written["checks"]] == [0.9, 0.01, 0.01]
