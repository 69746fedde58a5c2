"""The backends that the contract suite runs against, each with models in its own format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient

from millstream.services.extras import backends
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Instance
from tests.kit import functions, models, torch_models
from tests.kit.stack import Stack
from tests.kit.wait import wait_until

Spec = tuple[str, str, tuple[int, ...]]

EVERY = (*NUMPY, "BYTES")
ENDLESS = 5  # a run with this element lasts until it is terminated


def signature(inputs: Sequence[Spec], outputs: Sequence[Spec], batching: bool = True) -> Signature:
    def specs(rows: Sequence[Spec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in rows)

    return Signature(inputs=specs(inputs), outputs=specs(outputs), batching=batching)


def same(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 2)) -> Signature:
    return signature([("x", datatype, shape)], [("y", datatype, shape)])


def some(datatype: str, rows: int) -> Array:
    """Elements that tell themselves apart, in the form that a backend takes."""
    if datatype == "BYTES":
        texts = [f"row {i} é\0{i}".encode() for i in range(2 * rows)]
        return np.array(texts, dtype=object).reshape(rows, 2)
    return (np.arange(2 * rows) % 7).reshape(rows, 2).astype(NUMPY[datatype])


@dataclass(frozen=True)
class Case:
    """A backend and its models.

    Args:
        datatypes: those that it takes; it refuses the others when it loads.
        identity: writes a model whose output "y" is its input "x", [N, 2] of a datatype, to a folder; returns its path.
        endless: writes a model "x" -> "y", INT64 [N, 1], whose runs with ENDLESS must be terminated; None: has none.
        weighty: writes a model "x" -> "y", FP32 [N, 1], that holds this many bytes; None: the process holds none.
        threads: whether its instances have threads of their own, which can be counted.
        any_device: whether it takes every name of a device.
        device: what its instances run on.
    """

    name: str
    identity: Callable[[Path, str], Path]
    datatypes: tuple[str, ...] = EVERY
    endless: Callable[[Path], Path] | None = None
    weighty: Callable[[Path, int], Path] | None = None
    threads: bool = True
    any_device: bool = False
    device: str = "cpu"
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def load_identity(self, folder: Path, datatype: str = "FP32") -> Instance:
        if datatype not in self.datatypes:  # the backend looks at the signature first
            return get_backend(self.name).load(folder / "any", same(datatype), self.device, 1)
        return get_backend(self.name).load(self.identity(folder, datatype), same(datatype), self.device, 1)


def _onnx_identity(folder: Path, datatype: str) -> Path:
    return models.identity(folder / "identity.onnx", datatype)


def _onnx_weighty(folder: Path, size_bytes: int) -> Path:
    return models.weighty(folder / "weighty.onnx", size_bytes)


def _simulated(behaviour: dict[str, object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "model.json"
        path.write_text(json.dumps(behaviour))
        return path

    return write


def _simulated_weighty(folder: Path, size_bytes: int) -> Path:
    return _simulated({"bytes": size_bytes, "allocate": True})(folder)


ONNXRUNTIME = Case(
    "onnxruntime",
    _onnx_identity,
    endless=lambda folder: models.endless(folder / "endless.onnx", ENDLESS),
    weighty=_onnx_weighty,
)
OPENVINO = Case(
    "openvino",
    _onnx_identity,
    ("BOOL", "UINT8", "UINT16", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32"),
    endless=lambda folder: models.laborious(folder / "laborious.onnx", ENDLESS),
    weighty=_onnx_weighty,
    threads=False,
)
SIMULATED = Case(
    "simulated",
    lambda folder, _: _simulated({})(folder),
    endless=_simulated({"endless_if": ENDLESS}),
    weighty=_simulated_weighty,
    threads=False,
    any_device=True,
)
TORCH = Case(
    "torch",
    lambda folder, datatype: torch_models.identity(folder / "identity.pt2", datatype),
    tuple(NUMPY),
    endless=lambda folder: torch_models.laborious(folder / "laborious.pt2", ENDLESS),
    weighty=lambda folder, size_bytes: torch_models.weighty(folder / "weighty.pt2", size_bytes),
    threads=False,
    marks=(pytest.mark.needs("torch"),),
)


def _no_server(folder: Path, datatype: str) -> Path:
    raise AssertionError("replaced by the server's models")


TRITON = Case("triton", _no_server, threads=False)
PYTHON = Case(
    "python",
    functions.identity,
    tuple(one for one in EVERY if one != "BF16"),
    endless=lambda folder: functions.endless(folder, ENDLESS),
    threads=False,
)
CASES = [case for case in (ONNXRUNTIME, OPENVINO, SIMULATED, TORCH, TRITON, PYTHON) if case.name in backends()]


def remote_model(folder: Path, url: str, model: str, **others: object) -> Path:
    """Write a model file of the Triton backend."""
    path = folder / f"{model}.json"
    path.write_text(json.dumps({"url": url, "model": model, **others}))
    return path


def push_remote_models(stack: Stack, folder: Path) -> None:
    """Let a server have the models of `on_server`."""
    for datatype in EVERY:
        stack.push(f"identity-{datatype.lower()}", models.identity(folder / f"{datatype}.onnx", datatype))


def on_server(url: str) -> Case:
    """Return the case of the Triton backend, with the models of this server."""

    def identity(folder: Path, datatype: str) -> Path:
        name = f"identity-{datatype.lower()}"
        with InferenceServerClient(url) as client:  # on a busy machine a model that idles may miss a readiness probe
            wait_until(lambda: client.is_model_ready(name))
        return remote_model(folder, url, name)

    return replace(TRITON, identity=identity)
