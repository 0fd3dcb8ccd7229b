"""Runs from one Python process, as a program or a notebook has them: train, interrupt, resume, load, and again."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.core.errors import ConfigError, DataError, PhalanxError
from phalanx.core.placement import ExitCode, Placement
from phalanx.launch import child_run, from_python
from phalanx.report import notebook
from tests import warm_shell
from tests.dist import command
from tests.helpers import ROOT, run_ranks

# What a kernel has of IPython: there is a kernel, and elements of a page that can change.
KERNEL = """
import sys, types
shown = []
class Handle:
    def update(self, element):
        shown.append((repr(element), element._repr_html_()))
def display(element, display_id):
    shown.append((repr(element), element._repr_html_()))
    return Handle()
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython"].get_ipython = lambda: types.SimpleNamespace(kernel=object())
sys.modules["IPython.display"] = types.ModuleType("IPython.display")
sys.modules["IPython.display"].display = display
"""
# The stop button, once this many steps are done: what a KeyboardInterrupt of the main thread is.
STOP = """
import _thread, threading, time
from pathlib import Path
def stop(metrics, steps):
    def watch():
        while not metrics.exists() or metrics.read_text().count("\\n") < steps:
            time.sleep(0.02)
        _thread.interrupt_main()
    threading.Thread(target=watch, daemon=True).start()
"""
TWICE = (
    KERNEL
    + STOP
    + """
import phalanx, shutil
metrics = Path("runs/notebook/metrics.jsonl")
stop(metrics, 3)
how = {"run_dir": "runs/notebook", "ranks": 2, "balance": {"batch": "even"}}
run = phalanx.train("recipe.yaml", **how, train={"steps": 100_000})
assert not run.finished and "not finished" in repr(run), run
at = run.step
assert 3 <= at < 1000
print("stopped", flush=True)
import torch
model = run.load_model()
assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
# Torch has threads here by now: it goes on all the same. A second fresh Python would prove no more than the first.
sys.executable = shutil.which("phalanx")
run = phalanx.train("recipe.yaml", **how, train={"steps": at + 2})
assert run.finished and run.step == at + 2 == len(run.metrics()), run
assert [each["step"] for each in run.evaluations()][-1] == at + 2
texts = [text for text, _ in shown]
assert any(f"notebook step {at + 2}/{at + 2}  loss" in text for text in texts), texts[-3:]
assert "<svg" in shown[-1][1] or "<svg" in "".join(page for _, page in shown)
"""
)


def run_program(placement: Placement, folder: str) -> list[Any]:
    """Exit code and output of TWICE in a process that is forked, as is the second of its children."""
    from phalanx.cli import root

    root.main = lambda: warm_shell._run_python(sys.argv[1:])
    child_run.signal_at_parent_death = lambda parent, number: None  # which has forked it, not asked for it
    settings = {"CODE": TWICE, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}
    return warm_shell.run_script(placement, 'phalanx -c "$CODE"', folder, settings)


def test_twice_in_one_process_interrupted_loaded_and_resumed(tmp_path: Path) -> None:
    code, said = run_ranks(run_program, 1, timeout_s=280, folder=str(command.write_place(tmp_path)))[0]
    assert code == 0, said
    first, _, later = said.partition("stopped\n")
    assert "got SIGINT: finishing the step, saving, then leaving" in first
    assert "resumed from the checkpoint of step" in later and "finished after step" in later
    assert "\x1b" not in said, "a file has no colors, whatever Jupyter asks for"
    assert " step 1/" not in said, "the bar stands for lines of progress"


SMALL = {
    '"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2': '"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2',
    '"source": "stdlib", "seq_len": 128, "tokenizer_vocab": 2048': '"source": "text.jsonl", "seq_len": 8, '
    '"tokenizer_vocab": 280, "held_out": 0.3, "cache": "cache"',
    '"steps": 200, "global_batch": 16, "eval_every": 50, "eval_sequences": 32': '"steps": 4, "global_batch": 4, '
    '"eval_every": 2, "eval_sequences": 4, "micro_batch": 2',
    '"steps": 250': '"steps": 6',
    '{"every": 50},': '{"every": 50}, "balance": {"batch": "even"},',
    "max_tokens=40": "max_tokens=3",
}


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells one after the other, smaller."""
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for before, after in SMALL.items():
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    assert not any(cell.get("outputs") for cell in cells)
    monkeypatch.chdir(command.write_place(tmp_path))
    monkeypatch.setattr(child_run, "train_in_child", command.train_in_warm_child)
    exec(compile(code, "notebook.ipynb", "exec"), {})  # noqa: S102
    said = capsys.readouterr().out
    assert "6 steps, loss 5." in said and "held-out loss 5." in said
    assert (tmp_path / "runs" / "notebook-model" / "config.json").is_file()


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(command.write_place(tmp_path))
    return tmp_path


def test_recipes_are_files_mappings_and_what_was_loaded(place: Path) -> None:
    read = phalanx.load_recipe("recipe.yaml", "optim.lr=1e-2", train={"steps": 7}, **{"data.seq_len": 4})
    assert (read.optim.lr, read.train.steps, read.data.seq_len) == (0.01, 7, 4)
    assert phalanx.load_recipe(read) == read
    assert phalanx.load_recipe(read, train={"steps": 8}).train.steps == 8
    tree = {"model": {"preset": "llama-1-7b"}, "data": {"source": Path("text.jsonl")}, "train": {"steps": 3}}
    assert phalanx.load_recipe(tree).data.source == ["text.jsonl"]
    with pytest.raises(ConfigError, match=r"unknown key train\.step; did you mean train\.steps"):
        phalanx.load_recipe(tree, train={"step": 3})


def test_what_a_run_says_is_raised(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data\.source names gone\.jsonl, but no such file exists"):
        phalanx.train("recipe.yaml", run_dir="runs/a", ranks=1, data={"source": "gone.jsonl"})
    code = (
        "import phalanx\nclass Callback(phalanx.Callback):\n    def on_step_end(self, run, metrics): raise KeyError\n"
    )
    (place / "callback.py").write_text(code)
    monkeypatch.setattr(child_run, "train_in_child", command.train_in_warm_child)
    with pytest.raises(ConfigError, match=r"the run runs/a failed \(exit code 2\): .*on_step_end .* runs/a/logs"):
        phalanx.train("recipe.yaml", run_dir="runs/a", ranks=1, callback={"code": "callback.py"})
    nothing = phalanx.Run("runs/nothing")
    assert (nothing.finished, nothing.step, nothing.metrics()) == (False, 0, [])
    with pytest.raises(PhalanxError, match="holds no run"):
        nothing.load_model()


def test_callbacks_that_are_objects_need_a_process_that_can_fork(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_python, "thread_names", lambda: ["main", "other"])
    with pytest.raises(ConfigError, match=r"callbacks= needs a process without other threads, but this one has 2"):
        phalanx.train("recipe.yaml", run_dir="runs/a", callbacks=[phalanx.Callback()])


def test_a_child_that_says_nothing(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    assert child_run._read_answer(answer, -2) == ExitCode.STOPPED
    with pytest.raises(PhalanxError, match=r"ended without a result \(SIGKILL\)"):
        child_run._read_answer(answer, -9)
    answer.write_text("11")
    assert child_run._read_answer(answer, 0) == ExitCode.OUT_OF_MEMORY


def test_a_bar_keeps_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    page = types.ModuleType("IPython.display")
    vars(page)["display"] = lambda element, display_id: types.SimpleNamespace(update=lambda element: None)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", page)
    bar = notebook.NotebookBar(2000, "<run>")
    steps: list[dict[str, Any]] = [{"step": step, "loss": 5.0 - step / 1000} for step in range(1, 1501)]
    for record in steps:
        bar.on_step(record)
    assert 100 < len(bar._points) <= notebook.MOST_POINTS
    bar.on_step({"step": 100, "loss": 4.9})  # replayed
    assert bar._points[-1][0] <= 100
    assert "&lt;run&gt;" in bar._repr_html_() and "<polyline" in bar._repr_html_()
    assert repr(bar).startswith("<run> step 100/2000  loss 4.9")
