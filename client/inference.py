"""Procedures of inference: arrays, tables, texts, images in; an answer of the same kind out. Pure.

inputs ─> JSON header and raw tensors ─> reply ─> arrays by output name ─> an answer like the inputs

The signature of a model is read once and kept. It is read again when inputs do not fit it or the server refuses them:
another version may serve by now.
Source: Open Inference Protocol v2, inference and binary tensor data extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from millstream.client.call import Call, Pause, Reply, Steps, json_of, listed, send
from millstream.client.documents import Metadata
from millstream.client.inputs import Given, about_input, given_inputs, is_records, is_table
from millstream.client.models import load_s, metadata, v2_path
from millstream.client.replies import REQUEST_ID, document_of, parse_json
from millstream.client.retry import Budget
from millstream.client.tensors import Array, encode, from_data, random_input
from millstream.client.tensors import decode as decode_tensor
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.names import check_name


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request's body; `header_bytes` is the length of the JSON before its raw tensors, None if it is only JSON."""

    body: bytes
    header_bytes: int | None


@dataclass(frozen=True, slots=True)
class DecodedReply:
    """A reply's JSON, and its outputs by name in the reply's order."""

    document: dict[str, Any]
    outputs: dict[str, Array]


def encode_request(
    given: Iterable[Given],
    *,
    binary_outputs: bool = True,
    outputs: Sequence[str] | None = None,
    parameters: Mapping[str, object] | None = None,
    request_id: str = "",
) -> EncodedRequest:
    """Return a request with binary tensors. Raises Failure(INVALID) for values that a datatype cannot represent.

    Args:
        given: the inputs.
        binary_outputs: whether the reply has binary tensors.
        outputs: the outputs to return; None: all.
        parameters: further parameters of the request.
        request_id: the request's `id`; empty: none.
    """
    inputs, raws = [], []
    for spec, array in given:
        with about_input(spec["name"]):
            raws.append(encode(array, spec["datatype"]))
        tensor = {"name": spec["name"], "shape": list(array.shape), "datatype": spec["datatype"]}
        inputs.append({**tensor, "parameters": {"binary_data_size": len(raws[-1])}})
    document: dict[str, Any] = {"id": request_id} if request_id else {}
    document["inputs"] = inputs
    if outputs is not None:
        document["outputs"] = [{"name": name, "parameters": {"binary_data": binary_outputs}} for name in outputs]
    document["parameters"] = {"binary_data_output": binary_outputs, **(parameters or {})}
    header = json_of(document, "the request's parameters are")
    return EncodedRequest(b"".join([header, *raws]), len(header))


def random_request(metadata: Metadata, rows: int, random: np.random.Generator) -> EncodedRequest:
    """Return a request with `rows` rows of random values."""
    specs = metadata["inputs"]
    return encode_request(Given(spec, random_input(spec["datatype"], spec["shape"], rows, random)) for spec in specs)


def decode_reply(content: bytes | bytearray, header_bytes: str | None) -> DecodedReply:
    """Decode a reply. Raises Failure(INTERNAL) if it is malformed.

    Arrays share the memory of `content` where they are aligned there; those of a bytearray may be changed.
    `header_bytes` is the reply's Inference-Header-Content-Length; None if it has none.
    """
    view = memoryview(content)
    try:
        end = len(content) if header_bytes is None else int(header_bytes)
        document: dict[str, Any] = parse_json(view[:end])
        outputs = {}
        for tensor in document["outputs"]:
            bytes_ = (tensor.get("parameters") or {}).get("binary_data_size")
            if bytes_ is None:
                array = from_data(tensor["data"], tensor["datatype"], tensor["shape"])
            else:
                array = decode_tensor(view[end : end + bytes_], tensor["datatype"], tensor["shape"])
                end += bytes_
            outputs[tensor["name"]] = array if array.flags.aligned else array.copy()
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Failure(Code.INTERNAL, f"the server's reply is not an inference response: {error}") from error
    return DecodedReply(document, outputs)


SIGNATURES_MAX = 1024
_HEADER_LENGTH = "Inference-Header-Content-Length"

Signatures = dict[tuple[str, int | None], Metadata]
Scalar = str | int | float | bool


class PredictOptions(TypedDict, total=False):
    """The keyword arguments of `predict`."""

    version: int | None
    outputs: Sequence[str] | None
    request_id: str | None
    parameters: Mapping[str, Scalar] | None
    timeout: float | None


class Prediction(dict[str, Array]):
    """The outputs of one inference by name. Text is an array of `str`.

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


def predict(name: str, inputs: Any, options: Options, signatures: Signatures, budget: Budget) -> Steps[Any]:
    """Send inputs and return the answer: a DataFrame for a DataFrame, records for records, else a Prediction.

    Raises Failure(INVALID) if they do not fit the model's inputs.
    """
    key = (check_name(name), options.version)
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


def known_signature(name: str, version: int | None, signatures: Signatures) -> Steps[Metadata]:
    """Return the signature of a model, from the server unless it is kept."""
    key = (check_name(name), version)
    return signatures.get(key) or (yield from _learn(key, signatures))


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


def _predict(signature: Metadata, inputs: Any, options: Options, budget: Budget) -> Steps[Any]:
    encoded = _encode(signature, inputs, options, budget)
    answer = _prediction((yield from infer(signature["name"], options.version, encoded, options.request_id)))
    if is_table(inputs):
        return _like(inputs, row_columns(answer, len(inputs)))
    if is_records(inputs):
        rows = [row_columns(answer, len(inputs), wide=False)[name].tolist() for name in answer]
        return [dict(zip(answer, row, strict=True)) for row in zip(*rows, strict=True)]
    return answer


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
    body = json_of(document, "the request is")
    return document_of((yield from infer(name, version, EncodedRequest(body, None))))


def decode(reply: Reply) -> DecodedReply:
    """Return the document and the outputs of a reply. Raises Failure(INTERNAL) if it is malformed."""
    return decode_reply(reply.content, reply.headers.get(_HEADER_LENGTH.lower()))


def _encode(signature: Metadata, inputs: Any, options: Options, budget: Budget) -> EncodedRequest:
    request_id = options.request_id or ""
    if not isinstance(request_id, str) or not all("!" <= character <= "~" for character in request_id):
        raise invalid(f"the request id {str(request_id)[:40]!r} is a text of visible ASCII characters only")
    # The server drops requests whose caller has given up.
    parameters: dict[str, Scalar] = {"timeout": int(budget.left_s() * 1e6)} if budget.timeout_s is not None else {}
    return encode_request(
        given_inputs(signature, inputs),
        outputs=None if options.outputs is None else listed(options.outputs),
        parameters=parameters | dict(options.parameters or {}),
        request_id=request_id,
    )


def _prediction(reply: Reply) -> Prediction:
    document, outputs = (answer := decode(reply)).document, answer.outputs
    number = str(document.get("model_version", ""))
    request_id = reply.headers.get(REQUEST_ID) or str(document.get("id") or "")
    name = str(document.get("model_name", ""))
    texts = {output: as_text(array) for output, array in outputs.items()}
    return Prediction(texts, name, int(number) if number.isdigit() else None, request_id)


def as_text(array: Array) -> Array:
    """Return an output of text as `str`. An output with bytes that are no UTF-8 stays `bytes` as a whole."""
    if array.dtype != object:
        return array
    texts = np.empty(array.size, object)
    try:
        texts[:] = [one if isinstance(one, str) else one.decode() for one in array.ravel()]
    except UnicodeDecodeError:
        return array
    return texts.reshape(array.shape)


def row_columns(outputs: Mapping[str, Array], rows: int | None, *, wide: bool = True) -> dict[str, Array]:
    """Return outputs as the columns of a table: one for [rows] and [rows, 1], `name_0`, `name_1`, … for [rows, n].

    Args:
        outputs: by name.
        rows: of the table; None: those of the first output.
        wide: whether [rows, n] has n columns; otherwise its rows are lists in one column, as those of more dimensions
            always are.

    Raises:
        Failure: INVALID: an output has other rows than the table.
    """
    columns: dict[str, Array] = {}
    for name, array in outputs.items():
        rows = rows if rows is not None or not array.ndim else len(array)
        if not array.ndim or len(array) != rows:
            raise invalid(
                f"output '{name}' has shape {list(array.shape)}, which is not one row for each row of the input: "
                "pass arrays by input name for an answer in arrays"
            )
        named = {name: array}
        if array.ndim == 2 and array.shape[1] == 1:
            named = {name: array[:, 0]}
        elif array.ndim == 2 and wide:
            named = {f"{name}_{at}": array[:, at] for at in range(array.shape[1])}
        elif array.ndim > 1:
            named[name] = np.empty(len(array), object)
            named[name][:] = [row.tolist() for row in array]
        if twice := columns.keys() & named.keys():
            raise invalid(f"two outputs would have the column '{min(twice)}': choose one with `outputs`")
        columns |= named
    return columns


def _like(table: Any, columns: dict[str, Array]) -> Any:
    """Return columns as a table of the kind of another one, with its index if it has one."""
    kind = type(table)
    try:
        if hasattr(kind, "from_pydict"):  # of pyarrow
            return kind.from_pydict({name: list(column) for name, column in columns.items()})
        if hasattr(table, "index"):  # of pandas
            return kind(columns, index=table.index)
        return kind({name: column.tolist() if column.dtype == object else column for name, column in columns.items()})
    except Exception as error:  # of a library that is not known here
        raise invalid(f"the answer is no {kind.__module__}.{kind.__name__}: {error}; pass a dict of arrays") from error
