"""Exports small models with PyTorch's two exporters. python of_torch.py FOLDER"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

IMAGE, SERIES = torch.randn(2, 3, 8, 8), torch.randn(2, 8, 4)
IDS, MASK = torch.randint(0, 20, (2, 8)), torch.ones(2, 8, dtype=torch.int64)


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent, self.head = kind(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids), src_key_padding_mask=mask == 0)[:, 0])


class Causal(nn.Module):
    """Causal attention with a mask for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(32, 8)
        self.heads, self.out = nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        x = self.words(ids) + self.places(torch.arange(length).expand(rows, length))
        q, k, v = (part.view(rows, length, 2, 4).transpose(1, 2) for part in self.heads(x).chunk(3, -1))
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))[None, None] & mask[:, None, None].bool()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(rows, length, 8))


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        weights = mask.unsqueeze(-1).expand(words.size()).float()
        return self.head((words * weights).sum(1) / torch.clamp(weights.sum(1), min=1e-9))


class LastToken(Pooling):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        return self.head(words[torch.arange(words.size(0)), mask.sum(1) - 1])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(20, 8, mode="mean")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.words(ids)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.second, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(x + self.second(functional.relu(self.norm(self.first(x)))))
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(y, 1), 1))


class Patches(nn.Module):
    """A vision transformer: a token in front of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.patches = nn.Conv2d(3, 8, 2, 2)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1) + self.places
        return self.layers(tokens)[:, 0]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.softmax(self.scores(x), -1)
        return scores.argmax(-1), scores


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.window, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool2d(functional.relu(self.norm(self.window(x))), 2)
        return self.head(y.view(y.size(0), -1))


def _autoencoder() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, 2), nn.Sigmoid())


MODELS: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)), (torch.randn(2, 4),)),
    "cnn": (Flattened(), (IMAGE,)),
    "lstm": (Recurrent(nn.LSTM), (SERIES,)),
    "gru": (Recurrent(nn.GRU), (SERIES,)),
    "encoder": (Encoder(), (IDS, MASK)),
    "pooling": (Pooling(), (IDS, MASK)),
    "resnet": (Residual(), (IMAGE,)),
    "autoencoder": (_autoencoder(), (IMAGE,)),
    "classifier": (Classifier(), (torch.randn(2, 4),)),
    "causal attention": (Causal(), (IDS, MASK)),
    "vision transformer": (Patches(), (IMAGE,)),
    "last token": (LastToken(), (IDS, MASK)),
    "EmbeddingBag": (Bag(), (IDS,)),
}


def export(model: nn.Module, example: tuple[torch.Tensor, ...], path: Path, *, dynamo: bool, one_row: bool) -> None:
    """Export with variable rows and lengths, or as PyTorch does by default: with the sizes of an example of one row."""
    options: dict[str, Any] = {"dynamo": dynamo, "verbose": False, "external_data": False}
    if one_row:
        torch.onnx.export(model, tuple(given[:1] for given in example), str(path), **options)
        return
    lengths = {1: "length"} if example[0] is IDS else {}
    if dynamo:
        options["dynamic_shapes"] = tuple(dict.fromkeys([0, *lengths], torch.export.Dim.DYNAMIC) for _ in example)
    else:
        outputs = model(*example)
        names = [f"out{at}" for at in range(len(outputs) if isinstance(outputs, tuple) else 1)]
        inputs = [f"in{at}" for at in range(len(example))]
        axes: dict[str, dict[int, str]] = {name: {0: "rows"} for name in names} | {
            name: {0: "rows", **lengths} for name in inputs
        }
        options |= {"input_names": inputs, "output_names": names, "dynamic_axes": axes}
    torch.onnx.export(model, example, str(path), **options)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name, (model, example) in MODELS.items():
        for dynamo in (True, False):
            for one_row in (True, False):
                kind = "PyTorch, `dynamo=True`" if dynamo else "PyTorch, `dynamo=False`"
                rows = ", example of one row" if one_row else ""
                export(model.eval(), example, folder / f"{kind}{rows}; {name}.onnx", dynamo=dynamo, one_row=one_row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
