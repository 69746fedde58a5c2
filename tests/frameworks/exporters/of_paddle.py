"""Exports small models with Paddle2ONNX. python of_paddle.py FOLDER"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional
from paddle.static import InputSpec


class Recurrent(nn.Layer):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.recurrent, self.head = kind(4, 6), nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        states, _ = self.recurrent(x)
        return self.head(states[:, -1])


class Encoder(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1)

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = ((1 - mask.astype("float32")) * -1e9).unsqueeze([1, 2])
        return self.head(self.layers(self.words(ids), hidden)[:, 0])


class Pooling(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, ids: Any, mask: Any) -> Any:
        weights = mask.unsqueeze(-1).astype("float32")
        return (self.words(ids) * weights).sum(1) / paddle.clip(weights.sum(1), min=1e-9)


class Residual(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.window, self.norm, self.head = nn.Conv2D(3, 3, 3, padding=1), nn.BatchNorm2D(3), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        y = functional.relu(x + self.norm(self.window(x)))
        return self.head(paddle.flatten(functional.adaptive_avg_pool2d(y, 1), 1))


class Classifier(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        scores = functional.softmax(self.scores(x))
        return scores.argmax(-1), scores


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    table, image, series = ([InputSpec([None, *shape], name="x")] for shape in ((4,), (3, 8, 8), (5, 4)))
    tokens = [InputSpec([None, None], "int64", name) for name in ("ids", "mask")]
    window = (nn.Conv2D(3, 4, 3, padding=1), nn.BatchNorm2D(4), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten())
    halved, doubled = nn.Conv2D(3, 4, 3, stride=2, padding=1), nn.Conv2DTranspose(4, 3, 2, stride=2)
    models: dict[str, tuple[Any, Any]] = {
        "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)), table),
        "cnn": (nn.Sequential(*window, nn.Linear(64, 5)), image),
        "lstm": (Recurrent(nn.LSTM), series),
        "gru": (Recurrent(nn.GRU), series),
        "encoder": (Encoder(), tokens),
        "pooling": (Pooling(), tokens),
        "resnet": (Residual(), image),
        "autoencoder": (nn.Sequential(halved, nn.ReLU(), doubled, nn.Sigmoid()), image),
        "classifier": (Classifier(), table),
    }
    for name, (model, inputs) in models.items():
        model.eval()
        paddle.onnx.export(model, str(folder / "export"), input_spec=inputs)
        (folder / "export.onnx").rename(folder / f"Paddle2ONNX; {name}.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
