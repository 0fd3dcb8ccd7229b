"""Image classification as a custom task: a small residual network, and images in IDX files, the format of MNIST.

    phalanx train recipes/digits.yaml

Without `task.options: {folder: FOLDER}` it learns scikit-learn's bundled digits of 8 x 8 pixels. Group norm and
counter-based dropout do not depend on how a batch is divided, so any devices give the same loss curve.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx


class Block(nn.Module):
    """x + dropout(conv(gelu(conv(norm(x)))))."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.GroupNorm(4, width), dropout
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, draws: phalanx.CounterRNG | None, place: Tensor) -> Tensor:
        y = self.second(F.gelu(self.first(self.norm(x))))
        if draws is not None:  # a draw for each (sample, pixel, channel)
            y = draws.dropout(y.flatten(2).transpose(1, 2), place, self.dropout).transpose(1, 2).view_as(x)
        return x + y


class Net(phalanx.Model):
    """Images (B, 1, H, W) -> logits (B, classes). Its units are stem, layers.0 and so on, norm and head."""

    def __init__(self, width: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.GroupNorm(4, width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, draws: phalanx.CounterRNG | None = None) -> Tensor:
        x = self.stem(images)
        places = torch.arange(len(self.layers), device=x.device)  # as tensors: one compiled block serves all
        for place, block in zip(places, self.layers, strict=True):
            x = block(x, draws, place)
        return self.head(F.gelu(self.norm(x)).amax((2, 3)))


class Task(phalanx.Task):
    """What `task.code` looks for; the arguments are `task.options`."""

    def __init__(self, folder: str = "", width: int = 32, depth: int = 3, classes: int = 10, dropout: float = 0.1):
        self.folder, self.shape = folder, (width, depth, classes, dropout)

    def model(self) -> phalanx.Model:
        return Net(*self.shape)

    def train(self) -> phalanx.Images:
        return self.part("train", [number for number in range(1797) if number % 5])

    def held_out(self) -> phalanx.Images:
        return self.part("t10k", list(range(0, 1797, 5)))

    def part(self, name: str, of_digits: list[int]) -> phalanx.Images:
        if self.folder:
            return phalanx.load_mnist(self.folder, name, classes=self.shape[2])
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = (digits.images[of_digits] * 15).astype(np.uint8), digits.target[of_digits]
        return phalanx.Images(images, labels, "scikit-learn's digits", self.shape[2])

    def collate(self, samples: Sequence[tuple[np.ndarray, int]]) -> phalanx.Batch:
        images = torch.from_numpy(np.stack([image for image, _ in samples]))[:, None].float() / 255
        return phalanx.Batch({"images": images, "labels": torch.tensor([label for _, label in samples])}, len(samples))

    def loss_sum(self, model: nn.Module, batch: phalanx.Batch, draws: phalanx.CounterRNG | None) -> Tensor:
        return F.cross_entropy(model(batch.inputs["images"], draws), batch.inputs["labels"], reduction="sum")

    def counts(self, model: nn.Module, batch: phalanx.Batch) -> dict[str, Tensor]:
        right = model(batch.inputs["images"]).argmax(-1) == batch.inputs["labels"]
        return {"right": right.sum(), "images": torch.tensor(right.numel())}

    def scores(self, counts: dict[str, float]) -> dict[str, float]:
        return {"accuracy": counts["right"] / counts["images"]}
