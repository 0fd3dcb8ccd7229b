"""Encoding conversations, and prompts with completions, to token ids and a loss mask.

A chat template (Jinja, run in transformers' sandbox) writes a conversation as one text, which is encoded as a whole.
The assistant's part of the text is known exactly, in one of two ways: the template marks it with `{% generation %}`, or
the text up to each of the assistant's turns, rendered by itself with the header that asks for an answer, is the
beginning of the whole text. A template for which neither holds is refused.
"""

import itertools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, DataError
from phalanx.data.record_files import token_dtype
from phalanx.data.records import as_message
from phalanx.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from phalanx.data.records import Record, RecordFormat

ROLES = ("system", "developer", "user", "assistant", "tool")
# Templates that write today's date would make other tokens tomorrow; they are given this one, Llama 3's own default.
DATE = datetime(2024, 7, 26)
# Instead of transformers' own function, which asks the clock.
NO_CLOCK = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace('%{code}', '{DATE:%{code}}')" for code in ("-d", *"aAbBdeHIjmMpSyY"))
    + " -}}{%- endmacro -%}"
)
TEMPLATES = {
    # Turns are separated, not ended, by a newline, so that EOS follows the last answer at once and is learnt with it.
    "chatml": (
        "{% for message in messages %}{{ '' if loop.first else '\\n' }}"
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
    ),
}

Span = tuple[int, int]  # characters [start, stop) of a text
Messages = list[dict[str, Any]]


def load_template(template: str | None) -> str | None:
    """The text of `data.chat_template`: a built-in name or a file; None where the tokenizer's own is to be used.

    Raises ConfigError when the file is missing or empty.
    """
    if template is None or template in TEMPLATES:
        return TEMPLATES[template] if template else None
    try:
        text = Path(template).expanduser().read_text(encoding="utf-8")
        if text.strip():
            return text
        raise ConfigError(f"data.chat_template {template} is empty; write a template or leave out the key")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"data.chat_template {template} cannot be read ({reason}); give a Jinja file or one of "
            f"{', '.join(TEMPLATES)}"
        ) from None


def describe_missing_template(tokenizer: str, format: str) -> str:
    """The error for conversations without a chat template."""
    return (
        f"{tokenizer} has no chat template, so data.format {format} cannot format conversations; set "
        f"data.chat_template to a Jinja file or to {' or '.join(TEMPLATES)}"
    )


def check_chat_record(record: "Record", format: "RecordFormat") -> None:
    """Check that a record is a conversation, or a prompt with its completion, for any template. Raises DataError."""
    assert record.fields is not None
    if format.format == "chat":
        _conversation_of(record.fields, format.messages_key, record.where)
    else:
        _pair_of(record.fields, format.prompt_key, format.completion_key, record.where)
    _tools(record.fields, record.where)


class ChatEncoder:
    """Encodes records of the format "chat" or "prompt"; made once in each process.

    A chat record has a list of messages ({"role", "content"}) under `messages_key`; the assistant's turns are learnt,
    with the token by which the model ends its turn. A prompt record has `prompt_key` and `completion_key`, both texts
    or both lists of messages; the completion is learnt. `loss_on` "all": everything is. `template` is as in
    `load_template`. Raises ConfigError for a tokenizer or a template that cannot be used.
    """

    def __init__(self, tokenizer_folder: Path, format: "RecordFormat") -> None:
        assert format.format in ("chat", "prompt"), format
        assert format.loss_on in ("assistant", "all"), format
        tokenizer = load_tokenizer(tokenizer_folder)
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self._backend = tokenizer.backend
        # Where the tokenizer itself puts a token before a text (Llama's BOS), a prompt gets it too, as at generation.
        self._before = _added_before(self._backend)
        # It adds special tokens, which templates write themselves, and cuts white space from a token's place in the
        # text, which has to be exact here.
        self._backend.post_processor = None
        added = self._backend.get_added_tokens_decoder()
        self._special = {number for number, token in added.items() if token.special}
        self._format, self._learn_all = format, format.loss_on == "all"
        self._folder = tokenizer_folder
        self._template_text = load_template(format.chat_template)
        self._template: str | None = None
        self._names: dict[str, Any] = {}
        if format.format == "chat":
            self._open_template()

    def encode(self, records: "Sequence[Record]") -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The ids of all records behind one another, each ended by EOS; their lengths with EOS; and which are learnt.

        The last is None where all are (`loss_on` "all"). EOS is appended unless the template wrote it; then it is
        learnt if the text before it is, but for an answer that has its own end-of-turn token.
        Raises DataError naming the record, and ConfigError where the template is to blame.
        """
        encoded = list(itertools.starmap(self._encode, self._render_records(records)))
        dtype = token_dtype(self.vocab_size)
        lengths = np.fromiter((len(ids) for ids, _ in encoded), np.int64, len(encoded))
        if not encoded:
            return np.empty(0, dtype), lengths, None if self._learn_all else np.empty(0, np.bool_)
        tokens = np.concatenate([ids for ids, _ in encoded]).astype(dtype)
        return tokens, lengths, None if self._learn_all else np.concatenate([learnt for _, learnt in encoded])

    def _render_records(self, records: "Sequence[Record]") -> list[tuple[str, list[Span], bool, str | None]]:
        """(text, learnt spans, whether they may end in white space that the model does not emit, the prompt where it is
        text)."""
        rendered: list[tuple[str, list[Span], bool, str | None]] = []
        for record in records:
            fields, where = record.fields, record.where
            assert fields is not None, "a text record for a conversation encoder"
            if self._format.format == "chat":
                messages = _conversation_of(fields, self._format.messages_key, where)
                rendered.append((*self._conversation(messages, _tools(fields, where), where), None))
                continue
            prompt, completion = _pair_of(fields, self._format.prompt_key, self._format.completion_key, where)
            if isinstance(prompt, str) and isinstance(completion, str):
                rendered.append((prompt + completion, [(len(prompt), len(prompt + completion))], False, prompt))
                continue
            assert not isinstance(prompt, str)
            assert not isinstance(completion, str)
            text, start = self._split(prompt, prompt + completion, _tools(fields, where), where)
            rendered.append((text, [(start, len(text))], True, None))
        return rendered

    def _encode(
        self, text: str, spans: list[Span], trims: bool, prompt: str | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learnt = np.zeros(len(ids), np.bool_)
        if prompt is not None and ((places[:, 0] < len(prompt)) & (places[:, 1] > len(prompt))).any():
            # A token across the border: no prompt by itself ends with it. Encoded apart, as they are at generation.
            parts = [self._backend.encode(part, add_special_tokens=False).ids for part in (prompt, text[len(prompt) :])]
            ids = np.array([*parts[0], *parts[1]], np.int64)
            learnt = np.arange(len(ids)) >= len(parts[0])
        else:
            for start, stop in spans:
                first = int(np.searchsorted(places[:, 1], start, side="right"))
                last = int(np.searchsorted(places[:, 0], stop, side="left"))
                learnt[first : self._end_of_turn(ids, places, first, last, text) if trims else last] = True
        if prompt is not None:
            ids = np.concatenate([np.array(self._before, np.int64), ids])
            learnt = np.concatenate([np.zeros(len(self._before), np.bool_), learnt])
        if not len(ids) or ids[-1] != self.eos_id:
            unended = prompt is not None or (len(ids) > 0 and bool(learnt[-1]) and int(ids[-1]) not in self._special)
            ids, learnt = np.append(ids, self.eos_id), np.append(learnt, unended)
        return ids, learnt

    def _end_of_turn(self, ids: NDArray[np.int64], places: NDArray[np.int64], first: int, last: int, text: str) -> int:
        """Where the tokens [first, last) of a turn end that the model emits: white space after its last special token
        is the template's, since generation has stopped there."""
        for number in reversed(range(first, last)):
            if int(ids[number]) in self._special:
                return number + 1
            if text[places[number, 0] : places[number, 1]].strip():
                break
        return last

    # ------------------------------------------------------------------------------------------------------- templates

    def _open_template(self) -> str:
        """The chat template, looked up once: of many prompts of plain text none needs one."""
        if self._template is not None:
            return self._template
        from transformers import AutoTokenizer

        try:
            library = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
            self._names = dict(library.special_tokens_map)
        except Exception as error:  # transformers raises whatever a missing or foreign file raised
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"transformers cannot open the tokenizer in {self._folder} ({reason}), which data.format "
                f"{self._format.format} needs for its chat template; restore its files"
            ) from None
        own = library.chat_template
        if isinstance(own, dict):  # several by name
            own = own.get("default")
        found = self._template_text or own
        if not found:
            raise ConfigError(describe_missing_template(f"the tokenizer in {self._folder}", self._format.format))
        self._template = str(found)
        return self._template

    def _render(self, messages: Messages, tools: list[Any] | None, where: str, ask: bool) -> tuple[str, list[Span]]:
        """The text of a conversation, with the header of an answer behind it if `ask`; and what the template marks."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._open_template()
        answer: Any
        try:
            answer = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=NO_CLOCK + template if "strftime_now" in template else template,
                return_assistant_tokens_mask=_has_marks(template),
                add_generation_prompt=ask,
                **{"date_string": f"{DATE:%d %b %Y}", **self._names},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of {self._origin()} is not Jinja (line {error.lineno}: {error.message}); correct "
                "it or set data.chat_template"
            ) from None
        except Exception as error:  # a template is a program: it may fail in any way
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{where}: the chat template of {self._origin()} fails on this conversation ({reason}); correct the "
                "record or choose another data.chat_template"
            ) from None
        texts, marked = answer  # its type says str and means two lists
        return str(texts[0]), [(start, stop) for start, stop in (marked[0] if marked else []) if stop > start]

    def _conversation(self, messages: Messages, tools: list[Any] | None, where: str) -> tuple[str, list[Span], bool]:
        """The text of a conversation, the assistant's spans, and whether they may end in white space to be left out."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns and not self._learn_all:
            raise DataError(
                f"{where} has no assistant turn, so it has nothing to learn; delete it, or set data.loss_on=all"
            )
        text, marked = self._render(messages, tools, where, ask=False)
        if self._learn_all:
            return text, [(0, len(text))], False
        if _has_marks(self._open_template()):
            if not marked:
                raise ConfigError(
                    f"{where}: the chat template of {self._origin()} marks none of the assistant's tokens with {{% "
                    "generation %}, so nothing would be learned; correct the template or set data.chat_template"
                )
            return text, marked, False
        spans = []
        for number in turns:
            whole, start = self._split(messages[:number], messages[: number + 1], tools, where)
            if not text.startswith(whole):
                raise self._rewrites(number, where)
            spans.append((start, len(whole)))
        if all(start == stop for start, stop in spans):
            raise DataError(
                f"{where}: the chat template of {self._origin()} writes nothing for the assistant's turns, so there is "
                "nothing to learn; correct the record or the template"
            )
        return text, spans, True

    def _split(self, before: Messages, whole: Messages, tools: list[Any] | None, where: str) -> tuple[str, int]:
        """The text of a conversation and the character where what answers `before` begins in it."""
        if not before:
            raise DataError(
                f"{where} begins with the assistant's turn, and without {{% generation %}} marks in the chat "
                "template its start is unknown; put a system or user turn before it"
            )
        text, _ = self._render(whole, tools, where, ask=False)
        header, _ = self._render(before, tools, where, ask=True)
        if not text.startswith(header):
            raise self._rewrites(len(before), where)
        return text, len(header)

    def _rewrites(self, number: int, where: str) -> ConfigError:
        return ConfigError(
            f"{where}: the chat template of {self._origin()} formats the first {number + 1} messages differently "
            "when more follow, so the assistant's tokens cannot be located; set data.chat_template to a template "
            "with {% generation %} marks around the assistant's tokens"
        )

    def _origin(self) -> str:
        return "data.chat_template" if self._template_text else str(self._folder)


def _has_marks(template: str) -> bool:
    tags = (part.partition("%}")[0] for part in template.split("{%")[1:])
    return any(tag.strip("-+ \n\t") == "generation" for tag in tags)


def _added_before(backend: Any) -> list[int]:
    """The tokens that a tokenizer adds before a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def _field(fields: dict[str, Any], key: str, where: str, knob: str) -> Any:
    if key not in fields:
        keys = ", ".join(map(str, list(fields)[:8])) or "none"
        raise DataError(f"{where} has no key {key!r} (it has: {keys}); set {knob} to the right key")
    value = fields[key]
    if not isinstance(value, str | list):
        raise DataError(
            f"{where} has a {type(value).__name__} under {key!r} instead of "
            f"{'a list of messages' if knob == 'data.messages_key' else 'text or a list of messages'}; correct it"
        )
    return value


def _conversation_of(fields: dict[str, Any], key: str, where: str) -> Messages:
    return _messages(_field(fields, key, where, "data.messages_key"), where)


def _pair_of(
    fields: dict[str, Any], prompt_key: str, completion_key: str, where: str
) -> tuple[str | Messages, str | Messages]:
    """Prompt and completion: both texts, or both messages."""
    prompt = _field(fields, prompt_key, where, "data.prompt_key")
    completion = _field(fields, completion_key, where, "data.completion_key")
    if isinstance(prompt, str) != isinstance(completion, str):
        raise DataError(
            f"{where} has a prompt and a completion of different types; make both text or both lists of messages"
        )
    return (prompt, completion) if isinstance(prompt, str) else (_messages(prompt, where), _messages(completion, where))


def _messages(value: Any, where: str) -> Messages:
    """Checked messages, without the keys whose value is null, which many templates take for text."""
    if not isinstance(value, list) or not value:
        found = "an empty list" if isinstance(value, list) else f"a {type(value).__name__}"
        raise DataError(f"{where} has {found} instead of messages; give it at least one, or delete the line")
    messages = []
    for number, message in enumerate(map(as_message, value), 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{where}: message {number} has no "role"; write it as {{"role": ..., "content": ...}}')
        role, content = message["role"], message.get("content")
        if role not in ROLES:
            raise DataError(f"{where}: message {number} has the role {role!r}; use one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DataError(
                f'{where}: message {number} has {_kind(content)} as "content" instead of text; correct or delete it'
            )
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def _tools(fields: dict[str, Any], where: str) -> list[Any] | None:
    """The tools that the assistant may call, which most templates list before the conversation."""
    tools = fields.get("tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'{where} has "tools" that are not a list of JSON schemas; correct or delete them')
    return tools


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
