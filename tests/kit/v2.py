"""The client side of the v2 inference protocol, written independently of the product's own codec. Pure.

{name: array} ── request ──> body, headers          reply's body, headers ── outputs ──> {name: array}
Arrays of numpy's object dtype are BYTES; BF16 inputs are `Bf16` objects, BF16 outputs the bits in uint16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

Array = np.ndarray[Any, Any]

LENGTH = "Inference-Header-Content-Length"
#: Parameters of a request that waits longer than the default timeout (microseconds): a busy machine may need half a
#: minute to start a worker. Shorter than the clients of the kit wait.
PATIENT = {"timeout": 100_000_000}
_DATATYPES = {
    "bool": "BOOL",
    "object": "BYTES",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
} | {f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_DTYPES = {datatype: dtype for dtype, datatype in _DATATYPES.items()} | {"BF16": "uint16"}


class Bf16:
    """A BF16 tensor: the upper halves of float32 numbers."""

    def __init__(self, values: Array) -> None:
        self.bits = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def request(
    inputs: Mapping[str, Array | Bf16],
    *,
    binary: bool | Sequence[str] = True,
    binary_outputs: bool = True,
    parameters: Mapping[str, object] | None = None,
    **members: object,
) -> tuple[bytes, dict[str, str]]:
    """Return a body and its headers. `binary`: whether inputs are in binary form, or the names of those that are."""
    tensors: list[dict[str, object]] = []
    tail: list[bytes] = []
    for name, value in inputs.items():
        array = value.bits if isinstance(value, Bf16) else value
        datatype = "BF16" if isinstance(value, Bf16) else _DATATYPES[array.dtype.name]
        tensor: dict[str, object] = {"name": name, "shape": list(array.shape), "datatype": datatype}
        if binary is True or (binary is not False and name in binary):
            tail.append(raw(array))
            tensor["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            flat = np.ascontiguousarray(array).ravel()
            finite = array.dtype.kind != "f" or np.isfinite(flat).all()
            tensor["data"] = flat if finite and array.dtype != object else flat.tolist()
        tensors.append(tensor)
    document: dict[str, object] = {"inputs": tensors, **members}
    if binary_outputs or parameters:
        document["parameters"] = {"binary_data_output": binary_outputs, **(parameters or {})}
    head = _text(document)
    if binary is False:
        return head, {"Content-Type": "application/json"}
    return b"".join([head, *tail]), {"Content-Type": "application/octet-stream", LENGTH: str(len(head))}


def outputs(body: bytes, headers: Mapping[str, str]) -> dict[str, Array]:
    """Return the outputs of a reply by name, in its order."""
    length = headers.get(LENGTH) or headers.get(LENGTH.lower())
    end = len(body) if length is None else int(length)
    found: dict[str, Array] = {}
    at = end
    for tensor in _document(body[:end])["outputs"]:
        shape, datatype = tensor["shape"], tensor["datatype"]
        if "data" in tensor:
            assert len(tensor["data"]) == int(np.prod(shape))
            found[tensor["name"]] = np.array(tensor["data"], _DTYPES[datatype]).reshape(shape)
            continue
        part = body[at : at + tensor["parameters"]["binary_data_size"]]
        at += len(part)
        if datatype == "BYTES":
            found[tensor["name"]] = np.array(_strings(part), object).reshape(shape)
        else:
            found[tensor["name"]] = np.frombuffer(part, _DTYPES[datatype]).reshape(shape)
    assert at == len(body)
    return found


def raw(array: Array) -> bytes:
    """Return a tensor in binary form."""
    if array.dtype != object:
        return np.ascontiguousarray(array).tobytes()
    elements = [element.encode() if isinstance(element, str) else element for element in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def _strings(part: bytes) -> list[str]:
    found, at = [], 0
    while at < len(part):
        (size,) = struct.unpack_from("<I", part, at)
        found.append(part[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def _text(document: dict[str, object]) -> bytes:
    tensors: Any = document["inputs"]
    if any(isinstance(tensor.get("data"), list) for tensor in tensors):
        # the slower encoder, for values that strict JSON lacks: NaN and infinities
        return json.dumps(document, separators=(",", ":"), default=np.ndarray.tolist).encode()
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _document(text: bytes) -> Any:
    return json.loads(text) if b"NaN" in text or b"Infinity" in text else orjson.loads(text)
