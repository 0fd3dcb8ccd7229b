"""A model of one's own: a Llama whose feed-forward layer is a squared ReLU without a gate, in a file of one's own.

    python examples/custom_model.py FOLDER

trains it for a few steps, stops, goes on from the checkpoint, exports it as a Hugging Face folder, loads that with
transformers and compares the logits of both. In a recipe the class is named by its file: `model.code: custom_model.py`.
The run folder keeps a copy of the file, so it must not import others that lie beside it.
"""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.layout.model_shape import ModelSpec
from phalanx.models import llama
from phalanx.models.hf_config import read_config, spec_from_config
from phalanx.models.hf_weights import Weights
from phalanx.models.layers import Linear

RECIPE = """
model: {code: CODE, hidden: 64, layers: 2, heads: 4, kv_heads: 2, intermediate: 256}
data: {source: SOURCE, seq_len: 64, tokenizer_vocab: 512, cache: CACHE}
train: {steps: 8, global_batch: 8, micro_batch: 4, eval_sequences: 0}
optim: {lr: 1.0e-3, decay_steps: 12}
checkpoint: {every: 4}
report: {tensorboard: false}
"""


class SquaredReLU(nn.Module):
    """down(relu(up(x)) ^ 2). Source: So et al., "Primer: Searching for Efficient Transformers", 2021."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.up = Linear(spec.hidden, spec.intermediate, bias=False)
        self.down = Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(llama.Block):
    """A Llama's layer with the other feed-forward part."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.mlp = SquaredReLU(spec)


class Model(llama.Llama):
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


def phalanx(*arguments: str | Path) -> None:
    """The command line, as from a shell."""
    subprocess.run([sys.executable, "-m", "phalanx", *map(str, arguments)], check=True)


def main(folder: Path) -> float:
    """Train, go on, export, load, compare; returns the largest difference of a logit relative to the largest logit."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    recipe, run, exported = folder / "recipe.yaml", folder / "run", folder / "exported"
    values = {"CODE": Path(__file__), "SOURCE": Path(__file__), "CACHE": folder / "cache"}
    text = RECIPE
    for name, value in values.items():
        text = text.replace(name, str(value.resolve()))
    recipe.write_text(text)
    phalanx("train", recipe, "--run-dir", run)
    phalanx("train", recipe, "train.steps=12", "--run-dir", run)  # goes on from the checkpoint of step 8
    phalanx("export", run, exported)

    Model.register()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    spec = spec_from_config(read_config(exported), str(exported), Model.hf_config)
    ours, weights = Model(spec), Weights(exported, Model)
    weights.check(spec)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights.read(name, 0, parameter.numel()).view_as(parameter))
        tokens = torch.randint(0, spec.vocab_size, (2, 32))
        mine, expected = ours(tokens), theirs(tokens).logits
    difference = float((mine - expected).abs().max() / expected.abs().max())
    print(f"{type(theirs).__name__} and Model differ by {difference:.1e} in their logits")
    return difference


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "custom-model"))
