"""Conversations to tokens: the same ids as the libraries make, and exactly the assistant's tokens learnt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from phalanx.core.errors import ConfigError, DataError, PhalanxError
from phalanx.data.chat import TEMPLATES, ChatEncoder
from phalanx.data.records import Record, RecordFormat

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
PLAIN = (  # no special token ends a turn
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\\nA:' }}"
    "{% else %}{{ ' ' + m['content'] + '\\n' }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # as some reasoning models: an answer is written otherwise once another turn follows
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>"]  # fmt: skip
TEXT = ["Where is the sea? In the west, and it is green.", "system user assistant answer question Q: A:\n\n"]
TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Where is the sea?"}, {"role": "assistant", "content": "In the west."}],
    [
        {"role": "system", "content": "Be brief.  "},
        {"role": "user", "content": "Q\n\n"},
        {"role": "assistant", "content": "  Grün \u2014 wie das Meer \U0001f30a"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": " two\n"},
        {"role": "assistant", "content": "three"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def encoder_of(folder: Path, format: str, **keys: Any) -> ChatEncoder:
    return ChatEncoder(folder, RecordFormat(format, **keys))


def save_tokenizer(
    folder: Path, template: str | None, eos: str = "<|endoftext|>", bos: str | None = None, trims: bool = False
) -> Path:
    """A byte-level tokenizer with the special tokens of all templates, which puts `bos` before a text by itself.

    `trims`: it leaves white space out of a token's place in the text, as many do.
    """
    backend = Tokenizer(models.BPE())
    # As Llama 3 and Qwen cut: line ends stay with the white space before them.
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trims)]
    if bos:
        steps.append(processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]))
    backend.post_processor = processors.Sequence(steps)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "bos_token": "<|begin|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chat(talk: Any, where: str = "talks.jsonl, line 3", **more: Any) -> Record:
    return Record(None, {"messages": talk, **more}, where)


def one(encoder: ChatEncoder, record: Record) -> tuple[list[int], list[bool]]:
    tokens, lengths, mask = encoder.encode([record])
    assert lengths.tolist() == [len(tokens)]
    assert mask is not None
    return tokens.tolist(), mask.tolist()


def learnt_text(folder: Path, tokens: list[int], mask: list[bool]) -> str:
    """What is learnt, with a bar wherever something between is not."""
    library = AutoTokenizer.from_pretrained(str(folder))
    parts: list[list[int]] = [[]]
    for token, learnt in zip(tokens, mask, strict=True):
        if learnt:
            parts[-1].append(token)
        elif parts[-1]:
            parts.append([])
    return "|".join(str(library.decode(part)) for part in parts if part)


@pytest.mark.parametrize(("template", "marked"), [(CHATML, MARKED), (LLAMA3, LLAMA3_MARKED)])
def test_the_assistants_tokens_are_those_of_transformers(tmp_path: Path, template: str, marked: str) -> None:
    # With marks the library says which they are; without, they are found by rendering, and must be the same.
    plain, with_marks = save_tokenizer(tmp_path / "plain", template), save_tokenizer(tmp_path / "marked", marked)
    library = AutoTokenizer.from_pretrained(str(with_marks))
    for talk in TALKS:
        theirs: Any = library.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        for folder in (plain, with_marks):
            tokens, mask = one(encoder_of(folder, "chat"), chat(talk))
            assert tokens[-1] == library.eos_token_id
            assert tokens[:-1] == theirs["input_ids"]
            assert mask == [*map(bool, theirs["assistant_masks"]), False]


def test_what_is_learnt_is_what_the_model_has_to_say(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", CHATML, trims=True)
    tokens, mask = one(encoder_of(folder, "chat"), chat(TALKS[1]))
    answers = [talk["content"] + "<|im_end|>" for talk in TALKS[1] if talk["role"] == "assistant"]
    assert learnt_text(folder, tokens, mask) == "|".join(answers)


def test_the_end_of_the_turn_may_be_the_end_of_the_document(tmp_path: Path) -> None:
    # Llama 3's text ends with the end of the turn: where that is EOS no second one follows.
    folder = save_tokenizer(tmp_path / "t", LLAMA3, eos="<|eot_id|>")
    tokens, mask = one(encoder_of(folder, "chat"), chat(TALKS[0]))
    eot = AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    assert tokens[-1] == eot != tokens[-2]
    assert mask[-1]


def test_where_no_token_ends_a_turn_the_end_of_the_document_is_learnt(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", PLAIN)
    tokens, mask = one(encoder_of(folder, "chat"), chat(TALKS[0]))
    assert learnt_text(folder, tokens, mask) == " In the west.\n<|endoftext|>"
    # and so with the built-in template for a tokenizer that knows none of its words
    bare = tmp_path / "bare"
    bare.mkdir()
    text = json.loads((folder / "tokenizer.json").read_text())
    text["added_tokens"] = text["added_tokens"][:1]
    (bare / "tokenizer.json").write_text(json.dumps(text))
    (bare / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    assert "generation" in TEMPLATES["chatml"]
    tokens, mask = one(encoder_of(bare, "chat", chat_template="chatml"), chat(TALKS[1]))
    said = learnt_text(bare, tokens, mask)
    assert said.endswith("three<|im_end|><|endoftext|>")
    assert said.count("<|im_end|>") == 3


def test_the_built_in_template_is_chatml_but_for_the_last_newline(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", MARKED)
    for talk in TALKS:
        (own, own_mask), (built_in, mask) = (
            one(encoder_of(folder, "chat", chat_template=template), chat(talk)) for template in (None, "chatml")
        )
        newline = own[-2]
        assert [*built_in[:-1], newline] == own[:-1]
        assert [*mask[:-1], False] == own_mask[:-1]


def test_everything_is_learnt_if_asked(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", CHATML)
    encoder = encoder_of(folder, "chat", loss_on="all")
    tokens, _, mask = encoder.encode([chat(TALKS[0]), chat([{"role": "user", "content": "a"}])])
    assert mask is None
    assert (
        tokens[: len(one(encoder_of(folder, "chat"), chat(TALKS[0]))[0])].tolist()
        == one(encoder_of(folder, "chat"), chat(TALKS[0]))[0]
    )


def test_records_lie_behind_one_another(tmp_path: Path) -> None:
    encoder = encoder_of(save_tokenizer(tmp_path / "t", CHATML), "chat", messages_key="talk")
    records = [Record(None, {"talk": talk}, "x") for talk in TALKS]
    tokens, lengths, mask = encoder.encode(records)
    assert mask is not None
    apart = [encoder.encode([record]) for record in records]
    assert tokens.tolist() == np.concatenate([part[0] for part in apart]).tolist()
    assert mask.tolist() == np.concatenate([part[2] for part in apart if part[2] is not None]).tolist()
    assert lengths.tolist() == [len(part[0]) for part in apart]
    assert tokens.dtype == np.uint16
    nothing = encoder.encode([])
    assert [len(part) for part in nothing if part is not None] == [0, 0, 0]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + CHATML)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}
    template = tmp_path / "calls.jinja"
    template.write_text(
        "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% for m in messages %}[{{ m.role }}]"
        "{% generation %}{{ m.content or m.tool_calls[0].name }}{% endgeneration %}{% endfor %}"
    )
    encoder = encoder_of(folder, "chat", chat_template=str(template))
    tokens, mask = one(encoder, chat([TALKS[0][0], call], tools=[{"name": "watch"}]))
    assert learnt_text(folder, tokens, mask).endswith("|clock<|endoftext|>")
    assert str(AutoTokenizer.from_pretrained(str(folder)).decode(tokens)).startswith("watch[user]")
    with pytest.raises(DataError, match='line 3 has "tools" that are not a list of JSON schemas'):
        encoder.encode([chat(TALKS[0], tools="watch")])


# -------------------------------------------------------------------------------------------------------------- prompts


def trl_rows(folder: Path, records: list[dict[str, Any]], workplace: Path, **options: Any) -> list[dict[str, Any]]:
    """What trl's own trainer makes of records: rows with input_ids and labels."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    small = LlamaConfig(vocab_size=340, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    arguments = SFTConfig(
        output_dir=str(workplace), report_to=[], use_cpu=True, max_length=None, disable_tqdm=True, **options
    )
    with torch.device("cpu"):
        trainer = SFTTrainer(
            LlamaForCausalLM(small),
            args=arguments,
            train_dataset=Dataset.from_list(records),
            processing_class=AutoTokenizer.from_pretrained(str(folder)),
        )
    rows: Any = trainer.train_dataset
    return list(rows)


def labels_of(tokens: list[int], mask: list[bool]) -> list[int]:
    return [token if learnt else -100 for token, learnt in zip(tokens, mask, strict=True)]


def test_conversations_are_those_of_trl(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", LLAMA3_MARKED)
    rows = trl_rows(folder, [{"messages": talk} for talk in TALKS], tmp_path, assistant_only_loss=True)
    encoder = encoder_of(folder, "chat")
    for row, talk in zip(rows, TALKS, strict=True):
        tokens, mask = one(encoder, chat(talk))
        assert tokens[:-1] == row["input_ids"]
        assert labels_of(tokens, mask)[:-1] == row["labels"]


def test_prompts_and_completions_are_those_of_trl(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", LLAMA3, bos="<|begin|>")
    texts = [
        {"prompt": "Q: Where is the sea?\nA:", "completion": " In the west."},
        {"prompt": "assistant", "completion": ""},
        {"prompt": "Grün ", "completion": "\U0001f30a<|endoftext|>"},
    ]
    encoder = encoder_of(folder, "prompt")
    for row, fields in zip(trl_rows(folder, texts, tmp_path), texts, strict=True):
        tokens, mask = one(encoder, Record(None, fields, "x"))
        assert tokens == row["input_ids"]
        assert labels_of(tokens, mask) == row["labels"]
    talks = [{"prompt": TALKS[1][:4], "completion": TALKS[1][4:]}, {"prompt": TALKS[0][:1], "completion": TALKS[0][1:]}]
    for row, messages in zip(trl_rows(folder, talks, tmp_path), talks, strict=True):
        tokens, mask = one(encoder, Record(None, messages, "x"))
        assert tokens[:-1] == row["input_ids"]
        assert labels_of(tokens, mask)[:-1] == row["labels"]


def test_a_token_across_the_border_is_cut_as_at_generation(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "t", None)
    library = AutoTokenizer.from_pretrained(str(folder))
    prompt, completion = "the se", "a is green"
    assert len(library.encode(prompt + completion)) < len(library.encode(prompt)) + len(library.encode(completion))
    tokens, mask = one(encoder_of(folder, "prompt"), Record(None, {"prompt": prompt, "completion": completion}, "x"))
    assert tokens == [*library.encode(prompt), *library.encode(completion), library.eos_token_id]
    assert mask == [False] * len(library.encode(prompt)) + [True] * (len(library.encode(completion)) + 1)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return encoder_of(save_tokenizer(tmp_path_factory.mktemp("chat") / "t", CHATML), "chat")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [USER]}, "has no assistant turn, so it has nothing to learn"),
        ({"text": "a"}, "has no key 'messages' (it has: text); set data.messages_key"),
        ({"messages": {}}, "has a dict under 'messages' instead of a list of messages"),
        ({"messages": "hello"}, "has a str instead of messages"),
        ({"messages": []}, "has an empty list instead of messages"),
        ({"messages": [{"author": "human", "value": "a"}]}, 'message 1 has no "role"'),
        ({"messages": [USER, "a"]}, 'message 2 has no "role"'),
        ({"messages": [USER, {"role": "gpt", "content": "b"}]}, "message 2 has the role 'gpt'; use one of system"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, 'message 2 has nothing as "content"'),
        ({"messages": [USER, {"role": "assistant", "content": [{"text": "b"}]}]}, 'message 2 has a list as "content"'),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "begins with the assistant's turn"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(encoder: ChatEncoder, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder.encode([chat(TALKS[0]), Record(None, fields, "talks.jsonl, line 7")])
    assert str(caught.value).startswith("talks.jsonl, line 7")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "a"}, "has no key 'completion' (it has: prompt); set data.completion_key"),
        ({"prompt": 3, "completion": "b"}, "has a int under 'prompt' instead of text or a list of messages"),
        ({"prompt": "a", "completion": [USER]}, "a prompt and a completion of different types"),
        ({"prompt": [USER], "completion": []}, "has an empty list instead of messages"),
    ],
)
def test_a_record_that_is_no_prompt_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError) as caught:
        encoder_of(save_tokenizer(tmp_path / "t", CHATML), "prompt").encode([Record(None, fields, "p.jsonl, line 2")])
    assert str(caught.value).startswith("p.jsonl, line 2")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("template", "kind", "said"),
    [
        (
            None,
            ConfigError,
            "has no chat template, so data.format chat cannot format conversations; set data.chat_templ",
        ),
        ("{% for %}", ConfigError, "is not Jinja (line 1"),
        ("{{ raise_exception('only one turn') }}", DataError, "fails on this conversation (only one turn)"),
        ("{{ messages[7]['role'] }}", DataError, "fails on this conversation"),
        ("{{ messages.__class__.mro() }}", DataError, "fails on this conversation (access to attribute"),
        (FORGETFUL, ConfigError, "formats the first 2 messages differently when more follow"),
        ("{% generation %}{% endgeneration %}a", ConfigError, "marks none of the assistant's tokens"),
        ("always the same", DataError, "talks.jsonl, line 3: the chat template of "),
        ("{% for m in messages[:1] %}{{ m['content'] }}{% endfor %}", DataError, "writes nothing for the assistant's"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, template: str | None, kind: type[PhalanxError], said: str
) -> None:
    folder = save_tokenizer(tmp_path / "t", template)
    with pytest.raises(kind) as caught:
        encoder_of(folder, "chat").encode([chat([*TALKS[0], *TALKS[0]])])
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_file_is_used_or_named(tmp_path: Path) -> None:
    folder, file = save_tokenizer(tmp_path / "t", FORGETFUL), tmp_path / "own.jinja"
    with pytest.raises(
        ConfigError, match=r"own\.jinja cannot be read \(No such file or directory\); give a Jinja file"
    ):
        encoder_of(folder, "chat", chat_template=str(file))
    file.write_text(" \n")
    with pytest.raises(ConfigError, match=r"own\.jinja is empty; write a template or leave out the key"):
        encoder_of(folder, "chat", chat_template=str(file))
    file.write_text(CHATML)
    tokens, _ = one(encoder_of(folder, "chat", chat_template=str(file)), chat(TALKS[0]))
    assert tokens == one(encoder_of(save_tokenizer(tmp_path / "u", CHATML), "chat"), chat(TALKS[0]))[0]


@pytest.mark.parametrize("today", ["{{ date_string }}", "{{ strftime_now('%d %b %Y') }}"])
def test_a_template_that_writes_the_date_makes_the_same_tokens_every_day(tmp_path: Path, today: str) -> None:
    folder = save_tokenizer(tmp_path / "t", CHATML.replace("{% for", today + "{% for", 1))
    tokens, _ = one(encoder_of(folder, "chat"), chat(TALKS[0]))
    assert AutoTokenizer.from_pretrained(folder).decode(tokens).startswith("26 Jul 2024<|im_start|>")


def test_prompts_of_text_need_no_template(tmp_path: Path) -> None:
    encoder = encoder_of(save_tokenizer(tmp_path / "t", None), "prompt")
    encoder.encode([Record(None, {"prompt": "a", "completion": "b"}, "x")])
    with pytest.raises(ConfigError, match=r"has no chat template, so data\.format prompt cannot format conversations"):
        encoder.encode([Record(None, {"prompt": [USER], "completion": TALKS[0][1:]}, "x")])
