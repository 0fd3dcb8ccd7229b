"""Writing text: the tokens are those of transformers' own `generate`; prompts, chats, adapters and what is refused."""

import io
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.core.errors import ConfigError
from phalanx.data.chat import TEMPLATES
from phalanx.data.tokenizer import train_tokenizer
from phalanx.generate.text import (
    Sampling,
    TextGenerator,
    _stream,
    complete_file,
    complete_prompt,
    converse,
    load_generator,
    read_prompts,
)

GREEDY = Sampling(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face folder with a tokenizer; its weights are so wide that its likeliest tokens are no ties."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("model") / "hf"
    train_tokenizer([f"some words and number {i}, {i * i}" for i in range(200)], 300, made)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def chatty(folder: Path) -> Path:
    """The same with a chat template whose answers end in a text of several tokens."""
    made = folder.parent / "chatty"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    (made / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    return made


@pytest.fixture
def writer(folder: Path) -> Iterator[TextGenerator]:
    with load_generator(folder, GREEDY) as found:
        yield found


def likeliest(writer: TextGenerator, ids: list[int], count: int) -> list[int]:
    """Greedy decoding in its plainest form: the whole text anew for each token."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(writer.model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def test_the_likeliest_tokens_are_written(
    writer: TextGenerator, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = likeliest(writer, writer.tokenizer("some words")["input_ids"], 12)
    complete_prompt(folder, "some words", GREEDY)
    assert capsys.readouterr().out == writer.tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_sampling_options_have_their_effect(writer: TextGenerator) -> None:
    def text(**options: Any) -> str:
        writer.sampling = Sampling(**{"max_tokens": 12, "temperature": 1.0, **options})
        writer.reset_seed()
        return writer.complete("some words", show=False, echo=False)

    greedy = text(temperature=0.0)
    assert text(temperature=0.0, seed=1) == greedy
    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(4)}) > 1
    assert greedy == text(top_k=1, seed=5) == text(top_p=1e-6, seed=6)
    assert text(seed=2, top_k=300) == text(seed=2) != text(seed=2, top_k=2)
    ids = writer.tokenizer(text(temperature=0.0, repetition_penalty=1e6, max_tokens=40))["input_ids"]
    plain = writer.tokenizer(text(temperature=0.0, max_tokens=40))["input_ids"]
    assert len(set(ids)) / len(ids) > len(set(plain)) / len(plain)
    short = text(temperature=0.0, max_tokens=3).rstrip("\ufffd")
    assert greedy.startswith(short)
    assert len(short) < len(greedy)


def test_a_file_of_prompts_gives_json_lines(
    writer: TextGenerator, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = Sampling(max_tokens=6, seed=4)
    (tmp_path / "prompts.txt").write_text("some words\n\nand number\n")
    complete_file(folder, tmp_path / "prompts.txt", drawn, chat=False, system=None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    writer.sampling = drawn
    expected = []
    for prompt in ("and number", "some words"):
        writer.reset_seed()
        expected.append(writer.complete(prompt, show=False, echo=False))
    assert [line["prompt"] for line in lines] == ["some words", "and number"]
    assert [line["completion"] for line in lines] == expected[::-1]  # whatever came before


def test_a_conversation_is_remembered(
    chatty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("some words\n\nand number\n"))
    converse(chatty, None, "be brief", GREEDY)
    shown = capsys.readouterr().out
    with load_generator(chatty, GREEDY) as writer:
        writer.prepare_chat()
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "some words"}]
        text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nsome words<|im_end|>\n<|im_start|>assistant\n"
        ids = writer.tokenizer(text)["input_ids"]
        first = writer.tokenizer.decode(likeliest(writer, ids, 12)[len(ids) :], skip_special_tokens=True)
        assert writer.answer(messages, show=False) == first.strip()
        messages += [{"role": "assistant", "content": first.strip()}, {"role": "user", "content": "and number"}]
        second = writer.answer(messages, show=False)
    assert shown.rstrip() == f"{first}\n{second}".rstrip() or shown.split() == f"{first} {second}".split()


def test_a_long_conversation_loses_its_oldest_turns(chatty: Path) -> None:
    with load_generator(chatty, GREEDY) as writer:
        writer.prepare_chat()
        first = {"role": "system", "content": "be brief"}
        turns = [
            {"role": role, "content": f"{number} " + "some words " * 20}
            for number in range(8)
            for role in ("user", "assistant")
        ][:-1]
        everything = writer.tokenizer.apply_chat_template([first, *turns], add_generation_prompt=True, tokenize=False)
        writer.model.config.max_position_embeddings = 300
        kept = writer.tokenizer.decode(writer._fit_messages([first, *turns])["input_ids"][0])
        length = writer._fit_messages([first, *turns])["input_ids"].shape[1]
        more = [first, *turns[-2 * kept.count("<|im_start|>user") - 1 :]]  # with one question more
        longer = writer.tokenizer.apply_chat_template(more, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert length <= 300 - 12 < len(longer)
        assert len(writer.tokenizer(everything)["input_ids"]) > 300
        assert kept.startswith("<|im_start|>system\nbe brief") and everything.endswith(kept.partition("<|im_end|>")[2])
        assert "<|im_start|>user" in kept.split("<|im_end|>")[1], "an answer without its question"
        writer.model.config.max_position_embeddings = 40
        alone = writer.tokenizer.decode(writer._fit_messages([first, *turns])["input_ids"][0])
        assert alone.count("<|im_start|>user") == 1 and "7 some words" in alone


def test_one_message_is_answered(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converse(chatty, "some words", None, GREEDY)
    with load_generator(chatty, GREEDY) as writer:
        writer.prepare_chat()
        answer = writer.answer([{"role": "user", "content": "some words"}], show=False)
    assert capsys.readouterr().out.strip() == answer


def test_ctrl_c_cuts_off_an_answer_that_is_watched_and_ends_a_file_of_prompts(
    writer: TextGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    count = 0

    def press(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == 5:
            signal.raise_signal(signal.SIGINT)

    writer.model.register_forward_hook(press)
    done = writer.complete("some words", show=True, echo=False)
    count = -100
    writer.sampling = Sampling(max_tokens=4, temperature=0.0)  # what was written of it
    assert done == writer.complete("some words", show=False, echo=False)
    assert capsys.readouterr().out == done + "\n"  # so that the next question begins a line
    count = 3
    with pytest.raises(KeyboardInterrupt):
        writer.complete("some words", show=False, echo=False)


def test_the_end_of_an_answer_is_not_shown(writer: TextGenerator, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = _stream(writer.tokenizer, ["<|im_end|>"], show=True, echo=False)
    streamer.put(torch.tensor([[1, 2]]))  # the prompt
    for token in writer.tokenizer("a < b <|im_ and then<|im_end|> and more")["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert capsys.readouterr().out == "a < b <|im_ and then\n"
    assert streamer.text() == "a < b <|im_ and then"


def test_an_adapter_folder_writes_what_peft_writes(folder: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    theirs.save_pretrained(str(tmp_path))
    with load_generator(tmp_path, GREEDY) as writer, load_generator(folder, GREEDY) as base:
        ids = writer.tokenizer("some words", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = writer.model(ids).logits
            torch.testing.assert_close(logits, theirs.eval()(ids).logits, rtol=1e-4, atol=1e-4)
            assert (logits - base.model(ids).logits).abs().max() > 0.1


def test_what_cannot_write_is_refused(folder: Path, tmp_path: Path) -> None:
    def refusal(call: Any, *arguments: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            call(*arguments)
        return str(caught.value)

    assert "is neither a run folder" in refusal(complete_prompt, tmp_path, "x", GREEDY)
    assert "has no chat template" in refusal(converse, folder, "x", None, GREEDY)
    assert "the prompt has no tokens" in refusal(complete_prompt, folder, "", GREEDY)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/something"}')
    assert "is an adapter of the model somebody/something" in refusal(complete_prompt, tmp_path, "x", GREEDY)
    (tmp_path / "adapter_config.json").write_text("[")
    assert "cannot be read" in refusal(complete_prompt, tmp_path, "x", GREEDY)
    file = tmp_path / "prompts.jsonl"
    assert "cannot be read" in refusal(read_prompts, file)
    file.write_text("\n")
    assert "holds no prompt" in refusal(read_prompts, file)
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert 'line 2 is no JSON object with a key "prompt"' in refusal(read_prompts, file)
    file.write_text('{"prompt": ["a"]}\n')
    assert 'line 1 has no text under the key "prompt"' in refusal(read_prompts, file)
    file.write_bytes('{"prompt": "a\u2028b"}\r\n\n{"prompt": "b"}\n'.encode())
    assert read_prompts(file) == ["a\u2028b", "b"]
