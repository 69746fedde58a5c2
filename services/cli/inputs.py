"""Reads the input of `predict`, a file or standard input, into a request.

.npy, .npz -> arrays; JSON with "inputs" -> a v2 body, sent unchanged; other JSON -> arrays, by name or for one input
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from millstream.services.cli.failures import wrong_usage
from millstream.services.client.documents import Metadata, Tensor
from millstream.services.client.infer_codec import EncodedRequest, encode_request
from millstream.services.client.tensors import Array, from_data
from millstream.services.errors import Failure, invalid

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"


def read(source: str) -> bytes:
    """Return the bytes of a file, or of standard input for "-". Raises UsageFailure."""
    if source == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise wrong_usage(f"--input {source}: {error.strerror or error}") from error


def request_from(content: bytes, metadata: Metadata, *, binary_outputs: bool) -> EncodedRequest:
    """Return a request from the input's bytes; the first bytes tell the format. Raises Failure(INVALID)."""
    if content.startswith((_NPY, _ZIP)):
        return encode_request(metadata, _arrays(content, metadata), binary_outputs=binary_outputs)
    try:
        document = json.loads(content)
    except ValueError as error:
        raise invalid(
            f"the input is neither JSON nor .npy nor .npz: {error}; see `millstream predict --help`"
        ) from error
    if isinstance(document, dict) and "inputs" in document:
        return EncodedRequest(content, None)
    values = document if isinstance(document, dict) else {_only_input(metadata)["name"]: document}
    datatypes = {spec["name"]: spec["datatype"] for spec in metadata["inputs"]}
    arrays = {name: _array(value, datatypes.get(name, "BYTES"), name) for name, value in values.items()}
    return encode_request(metadata, arrays, binary_outputs=binary_outputs)


def _arrays(content: bytes, metadata: Metadata) -> dict[str, Array]:
    try:
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        if content.startswith(_NPY):
            return {_only_input(metadata)["name"]: loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except Failure:
        raise
    except Exception as error:
        # numpy and zipfile raise many kinds of exceptions for a broken file.
        raise invalid(f"the input is not a usable .npy or .npz file: {error}") from error


def _array(value: Any, datatype: str, name: str) -> Array:
    try:
        nested = np.asarray(value, dtype=object if datatype == "BYTES" else None)
        # Numbers keep their own type here, so that `encode` can reject values that the datatype cannot represent.
        return (
            nested
            if nested.dtype.kind in "biufO" and datatype != "BYTES"
            else from_data(value, datatype, list(nested.shape))
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid(f"input {name}: {error}") from error


def _only_input(metadata: Metadata) -> Tensor:
    specs = metadata["inputs"]
    if len(specs) != 1:
        names = ", ".join(spec["name"] for spec in specs)
        raise invalid(
            f"{metadata['name']} has {len(specs)} inputs ({names}): send them by name, as .npz or JSON object"
        )
    return specs[0]
