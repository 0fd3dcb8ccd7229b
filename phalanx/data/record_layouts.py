"""Layouts of records that other projects made common, read as conversations and prompts: ShareGPT's and Alpaca's."""

from typing import Any

from phalanx.data.sources import RecordFormat

SHAREGPT = "conversations"  # [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"  # Alpaca; the input may be empty or missing
KEYS = (SHAREGPT, INSTRUCTION, INPUT, OUTPUT, "system")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
# The prompts that Alpaca was trained with (Taori et al. 2023), with an input and without.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)

USUAL_KEYS = {"text": ("text",), "chat": ("messages", SHAREGPT), "prompt": ("prompt", INSTRUCTION)}


def guess_format(record: dict[str, Any], format: RecordFormat) -> str | None:
    """The `data.format` under whose usual keys a record stands, where that is not the one that is read."""
    named = [name for name, keys in USUAL_KEYS.items() if not record.keys().isdisjoint(keys)]
    return named[0] if named and format.format in USUAL_KEYS and format.format not in named else None


def normalise_record(record: dict[str, Any], format: RecordFormat) -> dict[str, Any]:
    """A record under the keys that `format` names. One that has these, or is of no known layout, stays as it is.

    Where conversations are read, ShareGPT's list and the pairs of Alpaca become messages; where prompts are read, the
    pairs of Alpaca a prompt in the words that Alpaca was trained with.
    """
    if all(key in record for key in format.columns()) or format.format not in ("chat", "prompt"):
        return record
    if format.format == "chat" and SHAREGPT in record:
        return record | {format.messages_key: _with_system(record, record[SHAREGPT])}
    if INSTRUCTION not in record or OUTPUT not in record:
        return record
    instruction, added, output = record[INSTRUCTION], record.get(INPUT) or "", record[OUTPUT]
    if not all(isinstance(part, str) for part in (instruction, added, output)):
        return record
    if format.format == "prompt":
        words = WITH_INPUT if added else WITHOUT_INPUT
        return record | {
            format.prompt_key: words.format(instruction=instruction, input=added),
            format.completion_key: output,
        }
    question = f"{instruction}\n\n{added}" if added else instruction
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
    return record | {format.messages_key: _with_system(record, messages)}


def _with_system(record: dict[str, Any], messages: Any) -> Any:
    """Messages with the record's own system prompt before them, where it has one."""
    system = record.get("system")
    if not isinstance(system, str) or not system or not isinstance(messages, list):
        return messages
    return [{"role": "system", "content": system}, *messages]


def as_message(message: Any) -> Any:
    """A turn of ShareGPT as a message; any other value as it is."""
    if not isinstance(message, dict) or "role" in message or not isinstance(message.get("from"), str):
        return message
    return {"role": ROLES.get(message["from"], message["from"]), "content": message.get("value")}
