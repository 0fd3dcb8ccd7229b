"""A user's first hour, from the wheel in an environment and a folder of its own, by the commands of the pages.

There are a text and conversations of the user's own, a Hugging Face folder that `transformers` has made, two nodes of
which one is killed, the report, and the export in `transformers`. What a page's command names, such as `my/*.jsonl`, is
replaced by what the user has; settings that make it small come last, and win.
"""

import json
import os
import pydoc_data.topics
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.core.json_lines import read_lines
from phalanx.core.records import EventKind, read_steps
from phalanx.core.run_paths import RunPaths
from tests import browser
from tests.helpers import ALL, ROOT, wait_until
from tests.unit.test_wheel import NOT_OURS, built

pytestmark = [
    pytest.mark.skipif(not ALL, reason="it takes minutes: `make test-all` walks it"),
    pytest.mark.timeout(1500),
]
PAGES = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
SHORT = [
    "data.seq_len=64",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.eval_sequences=8",
    "data.held_out=0.1",
]
SMALL = [
    "model.hidden=48", "model.layers=2", "model.heads=4", "model.kv_heads=2", "data.tokenizer_vocab=512", *SHORT,
    "optim.warmup_steps=5", "optim.decay_steps=1000",
]  # fmt: skip
# A model with random weights and a tokenizer of its own, as `transformers` saves them.
MAKE_HF = """
from pathlib import Path
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = ByteLevelBPETokenizer()
words.train([str(path) for path in Path("my").glob("*.txt")], vocab_size=600, special_tokens=["<|end|>"])
PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, eos_token="<|end|>").save_pretrained("hf/model")
config = LlamaConfig(vocab_size=600, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128, eos_token_id=0, bos_token_id=None)
LlamaForCausalLM(config).save_pretrained("hf/model")
"""
WRITE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, words = (kind.from_pretrained("out/my") for kind in (AutoModelForCausalLM, AutoTokenizer))
asked = words(sys.argv[1], return_tensors="pt", return_token_type_ids=False)
wrote = model.float().generate(**asked, max_new_tokens=20, do_sample=False)
print(words.decode(wrote[0], skip_special_tokens=True))
"""


class User:
    """Somebody with an environment that has the wheel in it, and a folder."""

    def __init__(self, place: Path) -> None:
        self.folder = place / "home"
        self.folder.mkdir()
        hidden = ("PYTHON", "PHALANX", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment |= {"HOME": str(self.folder), "PATH": f"{place / 'env' / 'bin'}:{os.environ['PATH']}"}

    def run(self, line: str) -> str:
        """What a line of a shell prints; it ends well."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"exit code {done.returncode} of {line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def do(self, line: str, *small: str, **mine: str) -> str:
        """Run a command of the pages, with what is the user's own in place of what it names, and settings behind it."""
        return self.run(self.own(line, *small, **mine))

    def own(self, line: str, *small: str, **mine: str) -> str:
        assert re.search(rf"^{re.escape(line)} *(#.*)?$", PAGES, re.M), f"no page has the command {line}"
        for theirs, ours in {**mine, "'my/*.jsonl'": "my", "/shared": str(self.folder / "shared")}.items():
            line = line.replace(theirs, ours)
        return shlex.join([line, *small]).replace(shlex.quote(line), line)

    @contextmanager
    def node(self, line: str, *small: str) -> Iterator[subprocess.Popen[str]]:
        """A node that goes on in the background; it is gone at the end."""
        command = self.own(line, *small)
        with open(self.folder / f"node-{time.time_ns()}.log", "w") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                text=True,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()


@pytest.fixture
def user(tmp_path: Path) -> User:
    """The wheel is built from a copy of the repository that is gone before anything else; what it asks for is taken
    from the environment of the tests, all but Phalanx."""
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(*NOT_OURS))
    wheel = built(tmp_path / "tree", "wheel", tmp_path / "dist")
    shutil.rmtree(tmp_path / "tree")
    (tmp_path / "rest").mkdir()
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "phalanx" not in package.name:
            (tmp_path / "rest" / package.name).symlink_to(package)
    user = User(tmp_path)
    user.run(f"{sys.executable} -m venv --without-pip {tmp_path / 'env'}")
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "rest.pth").write_text(f"{tmp_path / 'rest'}\n")
    user.run(f"python -m pip install --no-index {wheel}")  # it would look for whatever were missing, and find nothing
    return user


def write_own_data(folder: Path) -> None:
    """A text for each topic of Python's own help, and questions with their first paragraphs as answers."""
    (folder / "my").mkdir()
    (folder / "chat").mkdir()
    topics = {name: re.sub(r"[^\x20-\x7e\n]", "", text) for name, text in pydoc_data.topics.topics.items()}
    talks = []
    for name, text in topics.items():
        (folder / "my" / f"{name}.txt").write_text(text)
        answer = next((part for part in text.split("\n\n")[1:] if part.strip()), text)[:120]
        talks.append([("user", f"What is {name}?"), ("assistant", answer)])
    lines = [json.dumps({"messages": [{"role": role, "content": said} for role, said in talk]}) for talk in talks]
    (folder / "chat" / "talks.jsonl").write_text("\n".join(lines) + "\n")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_steps(RunPaths(run).metrics)]


def test_a_first_hour(user: User) -> None:
    write_own_data(user.folder)
    assert "demo" in user.do("phalanx recipes list")
    user.do("phalanx recipes copy demo")
    user.do("cp recipes/demo.yaml my.yaml")

    # A text of one's own; then further, on another number of ranks.
    train = "phalanx train my.yaml --ranks 2 --run-dir runs/my data.source='my/*.jsonl'"
    assert "devices  2 x cpu" in user.do(train, *SMALL, "train.steps=40")
    user.do("phalanx data inspect my.yaml data.source='my/*.jsonl' --samples 1", *SMALL)
    on = "phalanx train my.yaml --ranks 3 --run-dir runs/my data.source='my/*.jsonl' train.steps=600"
    assert "step 41" in user.do(on, *SMALL, "train.steps=60")
    walked = losses(user.folder / "runs" / "my")
    assert len(walked) == 60 and walked[-1] < walked[0] - 0.5

    # Out of Phalanx: transformers writes what it writes.
    user.do("phalanx export runs/my out/my")
    prompt = "The class statement"
    wrote = user.do(
        'phalanx generate out/my --prompt "def main(" --max-tokens 20 --temperature 0', **{'"def main("': f'"{prompt}"'}
    )
    assert wrote.strip() == user.run(f"python -c {shlex.quote(WRITE)} '{prompt}'").strip() and prompt in wrote

    # Conversations, on top of that; and a folder of somebody else's.
    user.do("phalanx recipes copy finetune-chat")
    tuned = user.do(
        "phalanx train recipes/finetune-chat.yaml model.from_hf=hf/model data.source='chat/*.jsonl'", *SHORT,
        "train.steps=6", **{"hf/model": "out/my"},
    )  # fmt: skip
    assert "finished after step 6" in tuned
    user.do("phalanx generate runs/finetune-chat --chat", "--prompt", "What is assert?", "--max-tokens", "5")
    user.run(f"python -c {shlex.quote(MAKE_HF)}")
    user.do("phalanx recipes copy continue-from-hf")
    more = (
        "phalanx train recipes/continue-from-hf.yaml model.from_hf=out/my data.source='my/*.jsonl' --run-dir runs/more"
    )
    assert "finished after step 6" in user.do(more, *SHORT, "train.steps=6", **{"out/my": "hf/model"})
    user.do("phalanx export runs/more out/more --dtype fp32")
    assert user.run("phalanx generate out/more --max-tokens 3")

    lose_a_node(user, walked)
    see_the_report(user)


def lose_a_node(user: User, walked: list[float]) -> None:
    """Two nodes, of which one is killed with all that it has started, and comes back; the curve is that of one node."""
    line = "phalanx train my.yaml --run-dir /shared/runs/my --nodes 2 --node-rank {} --rendezvous file:///shared/meet"
    small = [*SMALL, "data.source=my", "--ranks", "1", "train.steps=100000"]
    run = user.folder / "shared" / "runs" / "my"

    def reached(step: int) -> None:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(losses(run)) >= step, 200)

    def happened(kind: EventKind) -> bool:
        return any(event["kind"] == kind for event in read_lines(RunPaths(run).events))

    with user.node(line.format(0), *small) as first:
        with user.node(line.format(1), *small) as second:
            reached(20)
            second.send_signal(signal.SIGKILL)
            assert second.wait() == -signal.SIGKILL
        wait_until(lambda: happened(EventKind.NODE_LOST), 100)
        reached(len(losses(run)) + 20)
        with user.node(line.format(1), *small) as second:
            wait_until(lambda: happened(EventKind.NODE_JOINED), 200)
            reached(len(losses(run)) + 20)
            first.send_signal(signal.SIGINT)
            assert (first.wait(200), second.wait(200)) == (10, 10)
    assert losses(run)[:60] == pytest.approx(walked, rel=1e-3)


def see_the_report(user: User) -> None:
    run = user.folder / "shared" / "runs" / "my"
    user.do("phalanx report runs/my", **{"runs/my": "shared/runs/my"})
    if not browser.BROWSER:
        pytest.skip("all but the look at the report was walked: there is no chromium here")
    seen = browser.look(run / "report.html")
    assert seen.console == []
    drawn = browser.curves(seen)
    assert {"loss", "speed", "time", "memory", "lr", "norm", "shares"} <= drawn.keys() and min(drawn.values()) >= 1
    assert "was lost" in seen.page
