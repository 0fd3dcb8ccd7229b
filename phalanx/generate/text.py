"""Text generation with a trained model, by the transformers library: from a prompt, from a file of prompts, in a
chat."""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.generate.load_model import Phases, load_model, no_progress, shorten_error

_PROBE = "\u2042answer\u2042"  # does not occur in any template


@dataclass(frozen=True)
class Sampling:
    """Sampling options; `temperature` 0 takes the most likely token, without randomness."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 1.0  # sample from the most likely tokens of this total probability
    top_k: int = 0  # sample from this many of the most likely tokens; 0: from all
    repetition_penalty: float = 1.0  # divides the logits of tokens that occurred before
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Arguments for `generate` of transformers; all are given, since a folder may have different defaults."""
        common = {"max_new_tokens": self.max_tokens, "repetition_penalty": self.repetition_penalty}
        if self.temperature == 0:
            return common | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return common | {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


@dataclass
class TextGenerator:
    """A loaded model with its tokenizer."""

    tokenizer: Any
    model: Any
    sampling: Sampling
    _stop: list[str] = field(default_factory=list)  # texts that end an answer, if no single token does
    _ends: list[int] = field(default_factory=list)  # tokens that end an answer

    def reset_seed(self) -> None:
        """Reset the random generator to the seed."""
        from transformers import set_seed

        set_seed(self.sampling.seed)

    def complete(self, prompt: str, show: bool, echo: bool) -> str:
        """Complete a text; returns what was added. `show` streams it to standard output, `echo` with the prompt."""
        return self._generate(self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), show, echo, [])

    def answer(self, messages: list[dict[str, str]], show: bool) -> str:
        """The assistant's next turn of a conversation; the oldest turns are dropped if it is too long."""
        return self._generate(self._fit_messages(messages), show, False, self._stop)

    def _fit_messages(self, messages: list[dict[str, str]]) -> Any:
        """The tokens of as much of a conversation as leaves room for the answer in the model's positions: the
        system message is kept, and the last question, however long."""
        system = [one for one in messages[:1] if one["role"] == "system"]
        turns = messages[len(system) :]
        positions = getattr(self.model.config, "max_position_embeddings", None)
        while True:
            inputs = self.tokenizer.apply_chat_template(
                [*system, *turns], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            length = inputs["input_ids"].shape[1]
            if positions is None or length + self.sampling.max_tokens <= positions or len(turns) <= 2:
                return inputs
            turns = turns[2:]  # a question and its answer

    def prepare_chat(self) -> None:
        """Find out how an answer ends. Raises ConfigError if there is no template, or if it fails."""
        if not self.tokenizer.chat_template:
            raise ConfigError("this model's tokenizer has no chat template, so --chat has no effect; remove it")
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ConfigError(f"the tokenizer's chat template fails ({shorten_error(error)}); correct it") from error
        ending = text.rpartition(_PROBE)[2].strip()
        ids = self.tokenizer(ending, add_special_tokens=False)["input_ids"] if ending else []
        if len(ids) == 1:
            self._ends = ids
        elif ending:
            self._stop = [ending]

    def _generate(self, inputs: Any, show: bool, echo: bool, stop: list[str]) -> str:
        length = inputs["input_ids"].shape[1]
        if length == 0:
            raise ConfigError("the prompt has no tokens; give some text with --prompt")
        streamer = _stream(self.tokenizer, stop, show, echo)
        known = self.model.generation_config.eos_token_id
        eos = [*([known] if isinstance(known, int) else known or []), *self._ends]
        try:
            self.model.generate(
                **inputs.to(self.model.device),
                streamer=streamer,
                eos_token_id=eos or None,
                pad_token_id=self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else 0,
                **({"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}),
                **self.sampling.options(),
            )
        except KeyboardInterrupt:  # ends the answer; the text so far is kept
            if not show:
                raise
            streamer.end()
        return streamer.text()


def generate_text(
    model: Path | str,
    prompt: str,
    *,
    max_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
) -> str:
    """Continue a text with a trained language model, by transformers.

    Args:
        model: A run folder (its newest checkpoint is used, with adapters merged), a Hugging Face folder, an adapter
            folder of PEFT whose base model is on this machine; or the URL of one.
        prompt: The text to continue.
        max_tokens: Most tokens to add.
        temperature: 0 takes the likeliest token each time; higher values vary more.
        top_p: Draw among the likeliest tokens of this total probability.
        top_k: Draw among this many of the likeliest tokens; 0: among all.
        repetition_penalty: Above 1 avoids tokens that were there before.
        seed: The same seed gives the same text.

    Returns:
        What was added to `prompt`.

    Raises:
        errors.ConfigError: `model` is none of these, or writes no text.
        errors.CheckpointError: the run has no valid checkpoint.

    Examples:
        >>> text = phalanx.generate_text("runs/trained", "import", max_tokens=3)
    """
    sampling = Sampling(max_tokens, temperature, top_p, top_k, repetition_penalty, seed)
    with load_generator(model, sampling) as writer:
        writer.reset_seed()
        return writer.complete(prompt, show=False, echo=False)


def complete_prompt(model: Path | str, prompt: str, sampling: Sampling, phases: Phases = no_progress) -> None:
    """Print the prompt and its completion, token by token, until Ctrl-C.

    `model` is a run folder (its newest checkpoint is exported to a temporary folder first, adapters merged into it), a
    Hugging Face folder, or an adapter folder of PEFT whose base model is on this machine; or the URL of one. `phases`
    shows progress. Raises ConfigError if it is none of them.
    """
    with load_generator(model, sampling, phases) as writer:
        writer.reset_seed()
        writer.complete(prompt, show=True, echo=True)


def complete_file(
    model: Path | str, file: Path, sampling: Sampling, chat: bool, system: str | None, phases: Phases = no_progress
) -> None:
    """Print a JSON line {"prompt", "completion"} for each prompt of a file; each begins with the same seed.

    A prompt is a line of text, or of JSON with a key "prompt". `chat`: each is a user's message, after `system`.
    """
    prompts = read_prompts(file)
    with load_generator(model, sampling, phases) as writer:
        if chat:
            writer.prepare_chat()
        for prompt in prompts:
            writer.reset_seed()
            if chat:
                done = writer.answer([*_system_messages(system), {"role": "user", "content": prompt}], show=False)
            else:
                done = writer.complete(prompt, show=False, echo=False)
            _say(json.dumps({"prompt": prompt, "completion": done}, ensure_ascii=False) + "\n")


def converse(
    model: Path | str, prompt: str | None, system: str | None, sampling: Sampling, phases: Phases = no_progress
) -> None:
    """Answer `prompt`, or without one chat until the input ends (Ctrl-D); Ctrl-C interrupts an answer."""
    with load_generator(model, sampling, phases) as writer:
        writer.prepare_chat()
        writer.reset_seed()
        messages = _system_messages(system)
        for said in [prompt] if prompt is not None else _read_user_lines():
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": writer.answer(messages, show=True)})


def read_prompts(file: Path) -> list[str]:
    """Read the prompts of a file, one per line; empty lines are skipped. Raises ConfigError with file and line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # `splitlines` would split at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {file} cannot be read ({shorten_error(error)}); name a text file") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if file.suffix == ".jsonl" and line.strip():
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f'{file}, line {number} is no JSON object with a key "prompt"; correct it') from None
            if not isinstance(prompt, str):
                raise ConfigError(f'{file}, line {number} has no text under the key "prompt"; correct it')
            prompts.append(prompt)
        elif line.strip():
            prompts.append(line)
    if not prompts:
        raise ConfigError(f"{file} holds no prompt; write one a line")
    return prompts


@contextlib.contextmanager
def load_generator(model: Path | str, sampling: Sampling, phases: Phases = no_progress) -> Iterator[TextGenerator]:
    """Load `model`, see `complete_prompt`."""
    with load_model(model, phases) as (tokenizer, network):
        yield TextGenerator(tokenizer, network, sampling)


def _system_messages(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system is not None else []


def _read_user_lines() -> Iterator[str]:
    """Lines of the user's input, with a prompt mark on a terminal; empty ones are skipped."""
    mark = "> " if sys.stdin.isatty() else ""
    if mark:
        with contextlib.suppress(ImportError):  # with this module, `input` has arrow keys and a history
            importlib.import_module("readline")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(mark)
            if line.strip():
                yield line
    if mark:
        _say("\n")


def _stream(tokenizer: Any, stop: list[str], show: bool, echo: bool) -> Any:
    """A streamer that collects the generated text, prints it if requested, and hides a text that ends an answer."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=not echo, skip_special_tokens=True)
            self._parts: list[str] = []
            self._pending = ""  # possibly the beginning of a stop text
            self._over = False

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if not self._over:
                self._pending += text
            for end in stop:
                if end in self._pending:
                    self._pending, self._over = self._pending.partition(end)[0], True
            held = 0 if stream_end or self._over else max((_overlap(self._pending, end) for end in stop), default=0)
            ready = self._pending[: len(self._pending) - held]
            self._pending = self._pending[len(ready) :]
            self._parts.append(ready)
            if show:
                _say(ready + ("\n" if stream_end else ""))

        def text(self) -> str:
            return "".join(self._parts).strip() if stop else "".join(self._parts)

    return Streamer()


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _overlap(text: str, end: str) -> int:
    """Number of last characters of `text` that are the beginning of `end`."""
    return next((size for size in range(min(len(text), len(end)), 0, -1) if text.endswith(end[:size])), 0)
