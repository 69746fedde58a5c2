"""Train the digits example: scikit-learn's 1,797 real handwritten digits -> digits.onnx, held_out.npz, request.json.

    python -m millstream.examples.digits.train [FOLDER]

Needs scikit-learn and skl2onnx (`make install` installs them). The files that it writes are already in this folder.
Data: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HELD_OUT_SHARE = 0.25
SEED = 0
OPSETS = {"": 17, "ai.onnx.ml": 3}


class Digits(NamedTuple):
    """8 x 8 images as rows of 64 grey values 0 … 16 (float32), and the digit that each shows."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]


def split() -> tuple[Digits, Digits]:
    """Return the images for training and the held-out ones: a quarter of each digit, the same in every call."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_images, held_out_images, train_labels, held_out_labels = train_test_split(
        images.astype(np.float32), labels, test_size=HELD_OUT_SHARE, random_state=SEED, stratify=labels
    )
    return Digits(train_images, train_labels), Digits(held_out_images, held_out_labels)


def _with_shifts(digits: Digits) -> Digits:
    """Return the digits and four copies, moved one pixel up, down, left and right: their labels stay right."""
    padded = np.pad(digits.images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    corners = [(1, 1), (0, 1), (2, 1), (1, 0), (1, 2)]
    moved = [padded[:, top : top + 8, left : left + 8] for top, left in corners]
    return Digits(np.concatenate(moved).reshape(-1, 64), np.tile(digits.labels, len(corners)))


def fit(digits: Digits) -> Any:
    """Return a scikit-learn pipeline (scaling, multi-layer perceptron), fitted on `digits` and their shifted copies."""
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    network = MLPClassifier(hidden_layer_sizes=(128,), alpha=0.1, tol=1e-3, n_iter_no_change=5, random_state=SEED)
    shifted = _with_shifts(digits)
    # Such small matrices gain nothing from threads, and on busy cores waiting for threads takes six times as long.
    with threadpool_limits(limits=1):
        return make_pipeline(MinMaxScaler(), network).fit(shifted.images, shifted.labels)


def to_onnx(pipeline: Any) -> bytes:
    """Convert the pipeline to ONNX: "pixels" FP32 [N, 64] -> "label" INT64 [N], "probabilities" FP32 [N, 10]."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import FloatTensorType

    model = convert_sklearn(
        pipeline,
        "digits",
        initial_types=[("pixels", FloatTensorType([None, 64]))],
        options={"zipmap": False},
        target_opset=OPSETS,
    )
    return bytes(model.SerializeToString())


def request_for(image: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return the v2 inference request for one image of 64 grey values."""
    data = [float(value) for value in image]
    return {"inputs": [{"name": "pixels", "shape": [1, 64], "datatype": "FP32", "data": data}]}


def main(folder: Path) -> None:
    """Train the model and write the three files into `folder`."""
    digits, held_out = split()
    pipeline = fit(digits)
    print(f"held-out accuracy {pipeline.score(*held_out):.4f} on {len(held_out.labels)} images")
    (folder / "digits.onnx").write_bytes(to_onnx(pipeline))
    images, labels = held_out.images.astype(np.uint8), held_out.labels.astype(np.uint8)
    np.savez_compressed(folder / "held_out.npz", images=images, labels=labels)
    (folder / "request.json").write_text(json.dumps(request_for(images[0])) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
