"""Writing text with a trained model, by the transformers library."""

import tempfile
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.records import RunPaths


def stream(model: Path, prompt: str, max_tokens: int, temperature: float, seed: int) -> None:
    """Print the prompt and what the model adds to it, token by token.

    `model` is a run folder (its newest checkpoint is exported to a temporary folder first) or a Hugging Face folder.
    Raises ConfigError when it is neither.
    """
    if RunPaths(model).config.is_file():
        from phalanx.train.export import export_run

        with tempfile.TemporaryDirectory() as folder:
            export_run(RunPaths(model), Path(folder) / "model", None, note=False)
            _generate(Path(folder) / "model", prompt, max_tokens, temperature, seed)
    elif (model / "config.json").is_file():
        _generate(model, prompt, max_tokens, temperature, seed)
    else:
        raise ConfigError(f"{model} is neither a run folder nor a Hugging Face folder; name one that holds a model")


def _generate(folder: Path, prompt: str, max_tokens: int, temperature: float, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library raises whatever the missing or damaged file happened to raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(
            f"transformers cannot load a model and its tokenizer from {folder} ({reason}); fetch the folder's files "
            "again or name another"
        ) from error
    if torch.accelerator.is_available():
        model = model.to(torch.accelerator.current_accelerator())
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ConfigError("the prompt has no tokens; give some text with --prompt")
    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    model.generate(
        **inputs,
        max_new_tokens=max_tokens,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
