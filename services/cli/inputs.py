"""What people give `predict`: a file or standard input -> a request.

.npy, .npz -> arrays      JSON with "inputs" -> a v2 body, sent as it is      other JSON -> arrays by name, or the only one
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.cli.infer_codec import EncodedRequest, call_of
from millstream.services.cli.tensors import Array, from_data
from millstream.services.errors import Failure, invalid

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"


def read(source: str) -> bytes:
    """The bytes of a file, or of standard input for "-". Raises Failure(INVALID)."""
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise invalid(f"--input {source}: {error.strerror or error}") from error


def call_from(content: bytes, metadata: dict[str, Any], *, binary_outputs: bool) -> EncodedRequest:
    """A request from what was read; what it is is told by its first bytes. Raises Failure(INVALID)."""
    if content.startswith((_NPY, _ZIP)):
        return call_of(metadata, _arrays(content, metadata), binary_outputs=binary_outputs)
    try:
        document = json.loads(content)
    except ValueError as error:
        raise invalid(f"the input is neither JSON nor .npy nor .npz: {error}") from error
    if isinstance(document, dict) and "inputs" in document:
        return EncodedRequest(content, None)
    if isinstance(document, dict):
        given = document
    else:
        given = {_only_input(metadata)["name"]: document}
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    arrays = {name: _array(value, specs.get(name, {}), name) for name, value in given.items()}
    return call_of(metadata, arrays, binary_outputs=binary_outputs)


def _arrays(content: bytes, metadata: dict[str, Any]) -> dict[str, Array]:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if content.startswith(_NPY):
            return {_only_input(metadata)["name"]: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Failure:
        raise
    except Exception as error:
        # Whatever a broken archive makes numpy and zipfile raise, it is the file that is wrong.
        raise invalid(f"the input is not a usable .npy or .npz file: {error}") from error


def _array(value: Any, spec: dict[str, Any], name: str) -> Array:
    datatype = spec.get("datatype", "BYTES")
    try:
        nested = np.asarray(value, dtype=object if datatype == "BYTES" else None)
        # Numbers pass through their own type, so that what does not fit is seen when they are encoded.
        return (
            nested
            if nested.dtype.kind in "biufO" and datatype != "BYTES"
            else from_data(value, datatype, list(nested.shape))
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(f"input {name}: {error}") from error


def _only_input(metadata: dict[str, Any]) -> dict[str, Any]:
    specs: list[dict[str, Any]] = metadata["inputs"]
    if len(specs) != 1:
        names = ", ".join(spec["name"] for spec in specs)
        raise invalid(
            f"{metadata['name']} has {len(specs)} inputs ({names}): give them by name, as .npz or JSON object"
        )
    return specs[0]
