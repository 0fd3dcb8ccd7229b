"""A custom model: a Llama whose feed-forward layer is a squared ReLU without a gate.

    python examples/custom_model.py FOLDER

trains it for a few steps, resumes from the checkpoint, exports it as a Hugging Face folder, loads that with
transformers and compares the logits. A recipe names the file: `model.code: custom_model.py`. The run folder keeps a
copy, so the file must not import others that lie beside it.
"""

import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx

RECIPE = {
    "model": {"code": __file__, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256},
    "data": {"source": __file__, "seq_len": 64, "tokenizer_vocab": 512},
    "train": {"steps": 8, "global_batch": 8, "micro_batch": 4, "eval_sequences": 0},
    "optim": {"lr": 1e-3, "decay_steps": 12},
    "checkpoint": {"every": 4},
    "report": {"tensorboard": False},
}


class SquaredReLU(nn.Module):
    """down(relu(up(x)) ^ 2). Source: So et al., "Primer: Searching for Efficient Transformers", 2021."""

    def __init__(self, spec: phalanx.ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(phalanx.Llama.block):
    """A layer of Llama with this feed-forward part."""

    def __init__(self, spec: phalanx.ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.mlp = SquaredReLU(spec)


class Model(phalanx.Llama):
    """What `model.code` looks for. Names and starting values of the parameters are those of the built-in blocks."""

    block = Block
    hf_config: ClassVar = {
        "architectures": ["SquaredLlamaForCausalLM"],
        "model_type": "squared_llama",
        "hidden_act": "relu2",
    }

    @staticmethod
    def register() -> None:
        """Make transformers know the exported folders. Only this needs transformers; training does not."""
        import transformers
        from transformers.models.llama import modeling_llama

        class SquaredLlamaConfig(transformers.LlamaConfig):
            model_type = "squared_llama"

        class TheirSquaredReLU(nn.Module):
            def __init__(self, config: SquaredLlamaConfig) -> None:
                super().__init__()
                self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
                self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                return self.down_proj(F.relu(self.up_proj(x)).square())

        class SquaredLlamaForCausalLM(modeling_llama.LlamaForCausalLM):
            config_class = SquaredLlamaConfig

            def __init__(self, config: SquaredLlamaConfig) -> None:
                super().__init__(config)
                for layer in self.model.layers:
                    layer.mlp = TheirSquaredReLU(config)
                self.post_init()

        transformers.AutoConfig.register("squared_llama", SquaredLlamaConfig, exist_ok=True)
        transformers.AutoModelForCausalLM.register(SquaredLlamaConfig, SquaredLlamaForCausalLM, exist_ok=True)


def main(folder: Path) -> float:
    """Train, resume, export, load, compare; returns the largest difference of a logit relative to the largest logit."""
    import transformers

    cache = {"cache": str(folder / "cache")}
    phalanx.train(RECIPE, run_dir=folder / "run", data=cache)
    run = phalanx.train(RECIPE, run_dir=folder / "run", data=cache, train={"steps": 12})  # from step 8
    run.export(folder / "exported", dtype="fp32")

    Model.register()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported")
    ours = run.load_model()
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 32))
    with torch.no_grad():
        mine, expected = ours(tokens), theirs(tokens).logits
    difference = float((mine - expected).abs().max() / expected.abs().max())
    print(f"{type(theirs).__name__} and Model differ by {difference:.1e} in their logits")
    return difference


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "custom-model"))
