"""Procedures of inference: arrays in, arrays out. Pure.

The signature of a model is read once and kept. It is read again when arrays do not fit it or the server refuses them:
another version may serve by now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from millstream.services.client.call import Call, Pause, Reply, Steps, send
from millstream.services.client.documents import Metadata
from millstream.services.client.infer_codec import DecodedReply, EncodedRequest, decode_reply, encode_request
from millstream.services.client.models import load_s, metadata, v2_path
from millstream.services.client.replies import REQUEST_ID, document_of
from millstream.services.client.retry import Budget
from millstream.services.client.tensors import Array
from millstream.services.errors import Code, Failure, invalid

SIGNATURES_MAX = 1024
_HEADER_LENGTH = "Inference-Header-Content-Length"

Signatures = dict[tuple[str, int | None], Metadata]
Scalar = str | int | float | bool


class Prediction(dict[str, Array]):
    """The outputs of one inference by name.

    Attributes:
        model, version: what answered.
        request_id: the id of the request; the server's logs name it. Empty if the server gave none.
    """

    def __init__(self, outputs: Mapping[str, Array], model: str, version: int | None, request_id: str) -> None:
        super().__init__(outputs)
        self.model = model
        self.version = version
        self.request_id = request_id

    @property
    def array(self) -> Array:
        """The only output. Raises Failure(INVALID) if there are several."""
        if len(self) != 1:
            raise invalid(f"{self.model} has {len(self)} outputs: choose one of {', '.join(self)}")
        return next(iter(self.values()))


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say besides the inputs.

    `outputs` None: all outputs. `announce`: log the load that the first call of a model waits for.
    """

    version: int | None = None
    outputs: Sequence[str] | None = None
    request_id: str | None = None
    parameters: Mapping[str, Scalar] | None = None
    announce: bool = False


def predict(
    name: str, inputs: Mapping[str, ArrayLike] | ArrayLike, options: Options, signatures: Signatures, budget: Budget
) -> Steps[Prediction]:
    """Send arrays and return those of the reply. Raises Failure(INVALID) if they do not fit the model's inputs."""
    key = (name, options.version)
    kept = signatures.get(key)
    signature = kept or (yield from _learn(key, signatures))
    if kept is None and options.announce:
        yield from _announce(key)
    try:
        return (yield from _predict(signature, inputs, options, budget))
    except Failure as failure:
        if kept is None or failure.code is not Code.INVALID:
            raise
        signature = yield from _learn(key, signatures)
        if all(signature[part] == kept[part] for part in ("inputs", "outputs")):
            raise
    return (yield from _predict(signature, inputs, options, budget))


def _announce(key: tuple[str, int | None]) -> Steps[None]:
    """Log for how long the first call of a model waits, if it is not loaded."""
    name, _ = key
    try:
        seconds = yield from load_s(*key)
    except Failure:
        return  # the call itself tells
    if seconds:
        yield Pause(0.0, f"{name} is loading, predicted {seconds:.3g} s: the call waits for it")


def _learn(key: tuple[str, int | None], signatures: Signatures) -> Steps[Metadata]:
    """Read the signature of a model and version from the server, and keep it."""
    signature = yield from metadata(*key)
    if len(signatures) >= SIGNATURES_MAX:
        signatures.clear()
    signatures[key] = signature
    return signature


def _predict(
    signature: Metadata, inputs: Mapping[str, ArrayLike] | ArrayLike, options: Options, budget: Budget
) -> Steps[Prediction]:
    encoded = _encode(signature, inputs, options, budget)
    return _prediction((yield from infer(signature["name"], options.version, encoded, options.request_id)))


def infer(name: str, version: int | None, encoded: EncodedRequest, request_id: str | None = None) -> Steps[Reply]:
    """Send an encoded request, and return the reply as it is."""
    if encoded.header_bytes is None:
        headers = {"Content-Type": "application/json"}
    else:
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(encoded.header_bytes)}
    if request_id:
        headers["X-Request-Id"] = request_id
    path = f"{v2_path(name, version)}/infer"
    # Inference changes nothing, so it may be sent again.
    return (yield from send(Call("POST", path, headers=headers, content=encoded.body, repeatable=True)))


def infer_json(name: str, version: int | None, document: Mapping[str, Any]) -> Steps[dict[str, Any]]:
    """Send a v2 request as it is, and return the reply's document."""
    try:
        body = json.dumps(document).encode()
    except (TypeError, ValueError) as error:
        raise invalid(f"the request is not JSON: {error}") from error
    return document_of((yield from infer(name, version, EncodedRequest(body, None))))


def decode(reply: Reply) -> DecodedReply:
    """Return the document and the outputs of a reply. Raises Failure(INTERNAL) if it is malformed."""
    return decode_reply(reply.content, reply.headers.get(_HEADER_LENGTH.lower()))


def _encode(
    signature: Metadata, inputs: Mapping[str, ArrayLike] | ArrayLike, options: Options, budget: Budget
) -> EncodedRequest:
    if options.request_id is not None and not all("!" <= character <= "~" for character in options.request_id):
        raise invalid(f"the request id {options.request_id[:40]!r} may have visible ASCII characters only")
    if isinstance(inputs, Mapping):
        named = inputs
    else:
        names = [spec["name"] for spec in signature["inputs"]]
        if len(names) != 1:
            raise invalid(f"{signature['name']} has {len(names)} inputs: pass a dict with {', '.join(names)}")
        named = {names[0]: inputs}
    arrays = {name: _array(value, name) for name, value in named.items()}
    # The server drops requests whose caller has given up.
    parameters: dict[str, Scalar] = {"timeout": int(budget.left_s() * 1e6)} if budget.timeout_s is not None else {}
    return encode_request(
        signature,
        arrays,
        outputs=options.outputs,
        parameters=parameters | dict(options.parameters or {}),
        request_id=options.request_id or "",
    )


def _array(value: ArrayLike, name: str) -> Array:
    try:
        return np.asarray(value)
    except Exception as error:  # lists of different lengths, or whatever `__array__` of a foreign type raises
        raise invalid(f"input {name} is not an array: {error}") from error


def _prediction(reply: Reply) -> Prediction:
    document, outputs = (answer := decode(reply)).document, answer.outputs
    number = str(document.get("model_version", ""))
    request_id = reply.headers.get(REQUEST_ID) or str(document.get("id") or "")
    name = str(document.get("model_name", ""))
    return Prediction(outputs, name, int(number) if number.isdigit() else None, request_id)
