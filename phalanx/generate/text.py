"""Writing text with a trained model, by the transformers library: from a prompt, from a file of them, in a chat."""

import contextlib
import functools
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import ConfigError, fetch_hint
from phalanx.core.run_paths import VOCABULARY_FILES, RunPaths
from phalanx.models.hf_config import find_config_family, read_config
from phalanx.storage import files as storage
from phalanx.storage import mirror

ADAPTER = "adapter_config.json"  # what makes a folder one of PEFT's
_PROBE = "\u2042answer\u2042"  # what no template writes itself

# A context that gives what is told (phase, done, total) of the work before the first word.
Phases = Callable[[], contextlib.AbstractContextManager[Callable[[str, int, int], None]]]


def no_progress() -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Phases of which nobody is told."""
    return contextlib.nullcontext(lambda phase, done, total: None)


@dataclass(frozen=True)
class Sampling:
    """How each token is chosen; `temperature` 0 takes the likeliest, and then nothing is drawn."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 1.0  # draw among the likeliest tokens that together have this probability
    top_k: int = 0  # draw among this many; 0: among all
    repetition_penalty: float = 1.0  # divides the logits of tokens that were there before
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Arguments of `generate` of transformers; all are given, as a folder may bring defaults of its own."""
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
    _stop: list[str] = field(default_factory=list)  # texts that end an answer, where no single token does
    _ends: list[int] = field(default_factory=list)  # tokens that end an answer

    def reset_seed(self) -> None:
        """Begin the draws anew."""
        from transformers import set_seed

        set_seed(self.sampling.seed)

    def complete(self, prompt: str, show: bool, echo: bool) -> str:
        """Go on from a text; returns what was added. `show` streams it to standard output, `echo` with the prompt."""
        return self._generate(self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), show, echo, [])

    def answer(self, messages: list[dict[str, str]], show: bool) -> str:
        """The assistant's next turn of a conversation; the oldest turns are left out where it has grown too long."""
        return self._generate(self._fit_messages(messages), show, False, self._stop)

    def _fit_messages(self, messages: list[dict[str, str]]) -> Any:
        """The tokens of as much of a conversation as leaves room for the answer in the model's positions: what the
        system says stays, and the last question, however long it is."""
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
        """Look up how an answer ends. Raises ConfigError where there is no template, or it fails."""
        if not self.tokenizer.chat_template:
            raise ConfigError("this model's tokenizer has no chat template, so there is no chat; leave --chat out")
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ConfigError(f"the tokenizer's chat template fails ({_brief(error)}); correct it") from error
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
        except KeyboardInterrupt:  # cuts off an answer that somebody watches; what was written of it stays
            if not show:
                raise
            streamer.end()
        return streamer.text()


def complete_prompt(model: Path | str, prompt: str, sampling: Sampling, phases: Phases = no_progress) -> None:
    """Print the prompt and what the model adds to it, token by token. Ctrl-C cuts it off.

    `model` is a run folder (its newest checkpoint is exported to a temporary folder first, adapters merged into it), a
    Hugging Face folder, or an adapter folder of PEFT's whose base model is on this machine; or the URL of one. `phases`
    shows how far that is. Raises ConfigError when it is none of them.
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
    """Answer `prompt`, or without one talk until the input ends (Ctrl-D); Ctrl-C cuts an answer off."""
    with load_generator(model, sampling, phases) as writer:
        writer.prepare_chat()
        writer.reset_seed()
        messages = _system_messages(system)
        for said in [prompt] if prompt is not None else _read_user_lines():
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": writer.answer(messages, show=True)})


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file, one a line; empty lines are passed over. Raises ConfigError naming file and line."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # `splitlines` would split at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {file} cannot be read ({_brief(error)}); name a text file") from None
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
    """Load what `model` names, see `complete_prompt`."""
    with _open_model(model) as paths:
        folder = paths.root
        if paths.config.is_file():
            with tempfile.TemporaryDirectory() as temporary:
                yield TextGenerator(*_load_run(paths, Path(temporary) / "model", phases), sampling)
        elif (folder / ADAPTER).is_file():
            yield TextGenerator(*_load(_base_of(folder), folder, phases), sampling)
        elif (folder / "config.json").is_file():
            _refuse_encoder(folder)
            yield TextGenerator(*_load(folder, None, phases), sampling)
        else:
            raise ConfigError(
                f"{model} is neither a run folder nor a Hugging Face folder nor an adapter's; name one that holds a "
                f"model{fetch_hint(model)}"
            )


def _refuse_encoder(folder: Path) -> None:
    """Raises ConfigError for a BERT's folder: transformers would make a writer of it, whose text means nothing."""
    family = None
    with contextlib.suppress(ConfigError, RecursionError):  # transformers says what is wrong with it
        family = find_config_family(read_config(folder))
    if family is not None and not family.writes_text:
        raise ConfigError(
            f"{folder} holds a {family.title}, which writes no text; name a model that does, or load this one with the "
            "class of transformers that its config.json names"
        )


def _load_run(paths: RunPaths, folder: Path, phases: Phases) -> tuple[Any, Any]:
    """A run's newest checkpoint by way of `folder`; of a run with adapters these alone, added to the weights that they
    were trained beside, as the whole model would be as large on the disk as in memory."""
    from phalanx.trainer.export import export_run
    from phalanx.trainer.run_folder import read_run_config
    from phalanx.workload.adapters import check_base_weights
    from phalanx.workload.local_copies import fetch_local_copies
    from phalanx.workload.workload import read_model_shape, resolve_model_class

    config = read_run_config(paths)
    if config is not None and config.task.kind == "custom":
        raise ConfigError(
            f"{paths.display_name} trained the network of a task of its own ({config.task.code}), which writes no "
            "text; `phalanx export` gives its parameters"
        )
    if config is not None and config.task.kind in ("masked", "tag", "classify"):
        raise ConfigError(
            f"{paths.display_name} trained a BERT (task.kind {config.task.kind}), which writes no text; `phalanx "
            "export` makes a folder of it that transformers loads"
        )
    apart = config is not None and config.model.lora is not None and config.model.code is None
    with phases() as progress:
        show = functools.partial(progress, "export")
        export_run(paths, folder, None, show, note=False, merge=False if apart else None)
    if config is not None and apart:
        base = fetch_local_copies(config)
        check_base_weights(base, read_model_shape(base, paths), resolve_model_class(base, paths), paths)
        return _load(Path(str(base.model.from_hf)).expanduser(), folder, phases)
    if config is not None:
        resolve_model_class(config, paths).register()  # so that transformers knows a model of a user's own
    return _load(folder, None, phases)


@contextlib.contextmanager
def _open_model(model: Path | str) -> Iterator[RunPaths]:
    """The folder itself, or a copy of what lies at a URL."""
    if not storage.is_url(model):
        yield RunPaths(Path(model))
        return
    with mirror.open_remote_records(str(model)) as paths:
        yield paths


def _base_of(adapter: Path) -> Path:
    """The folder of the model that an adapter belongs to."""
    try:
        named = json.loads((adapter / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{adapter / ADAPTER} cannot be read ({_brief(error)}); fetch the folder again") from None
    base = Path(str(named)).expanduser()
    if not named or not (base / "config.json").is_file():
        raise ConfigError(
            f"{adapter} is an adapter of the model {named}, which is no folder on this machine; put the base model "
            f"there, or set base_model_name_or_path in {adapter / ADAPTER} to its folder"
        )
    return base


def _load(folder: Path, adapter: Path | None, phases: Phases) -> tuple[Any, Any]:
    with phases() as progress:
        progress("load", 0, 1)
        loaded = _load_from_hf(folder, adapter)
        progress("load", 1, 1)
    return loaded


def _load_from_hf(folder: Path, adapter: Path | None) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own = adapter is not None and any((adapter / name).is_file() for name in VOCABULARY_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(adapter if own else folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever the missing or damaged file happened to raise
        raise ConfigError(
            f"transformers cannot load a model and its tokenizer from {folder} ({_brief(error)}); fetch the folder's "
            "files again or name another"
        ) from error
    if adapter is not None:
        _merge(model, adapter)
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    return tokenizer, model


def _merge(model: Any, folder: Path) -> None:
    """Add an adapter to the weights that it belongs to, as an export of a run with adapters does."""
    import torch

    from phalanx.models.lora import adapter_names, merge_adapter
    from phalanx.models.peft import Adapter
    from phalanx.models.user_model import hf_name

    layers = int(model.config.num_hidden_layers)
    adapter = Adapter(folder, layers, hf_name)
    weights = dict(model.named_parameters())
    rank, shapes = adapter.lora.rank, dict[str, tuple[int, ...]]()
    for matrix, a, b in adapter_names(adapter.lora, layers):
        rows, columns = weights[hf_name(matrix)].shape
        shapes |= {a: (rank, columns), b: (rows, rank)}
    adapter.check_shapes(shapes)

    def tensor(name: str) -> torch.Tensor:
        return adapter.read(name, 0, math.prod(shapes[name])).view(shapes[name])

    with torch.no_grad():
        for matrix, a, b in adapter_names(adapter.lora, layers):
            weight = weights[hf_name(matrix)]
            weight.copy_(merge_adapter(weight, tensor(a), tensor(b), adapter.lora.scale))


def _system_messages(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system is not None else []


def _read_user_lines() -> Iterator[str]:
    """What the user says: lines of the input, with a mark before each on a terminal; empty ones are passed over."""
    mark = "> " if sys.stdin.isatty() else ""
    if mark:
        with contextlib.suppress(ImportError):  # where it is loaded, `input` has arrow keys and a history
            importlib.import_module("readline")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            line = input(mark)
            if line.strip():
                yield line
    if mark:
        _say("\n")


def _stream(tokenizer: Any, stop: list[str], show: bool, echo: bool) -> Any:
    """A streamer that keeps what was generated, prints it if asked, and hides a text that ends an answer."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=not echo, skip_special_tokens=True)
            self._parts: list[str] = []
            self._pending = ""  # may be the beginning of a stop text
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
    """How many last characters of `text` are the beginning of `end`."""
    return next((size for size in range(min(len(text), len(end)), 0, -1) if text.endswith(end[:size])), 0)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
