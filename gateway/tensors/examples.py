"""What an error document says about a request that does not fit: the signature, a request that works. Pure.

Signature, trial (inputs with which the model check ran a row) ─> samples ─> a protocol's body ─> `example`, if it is
short, else `example_python`, an expression that makes the body
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson

from millstream.services.model.datatypes import BINARY_ONLY, BYTES, FLOATS, NUMPY, encode_elements
from millstream.services.model.manifest import TrialInputs
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs

#: longer parts of an error document are left out; GET /v2/models/NAME has the whole signature
SIGNATURE_BYTES_MAX = 4096
EXAMPLE_BYTES_MAX = 1024
PYTHON_CHARACTERS_MAX = 2048
_ELEMENTS_MAX = 512  # of an example that is written as JSON


class Filled(NamedTuple):
    """Equal elements, nested as `shape` says. A body may contain it in place of a list."""

    shape: tuple[int, ...]
    element: Any

    def value(self) -> Any:
        """Return the nested lists, or the element if the shape is ()."""
        nested = self.element
        for dim in reversed(self.shape):
            nested = [nested] * dim
        return nested

    def python(self) -> str:
        """Return an expression for the value, short whatever the shape: "[[0.0] * 224] * 3"."""
        text = repr(self.element)
        for dim in reversed(self.shape):
            text = f"[{text}]" if dim == 1 else f"[{text}] * {dim}" if dim else "[]"
        return text


class Sample(NamedTuple):
    """One input of an example, with equal elements."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    element: Any  # in JSON

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def flat(self) -> Filled:
        return Filled((self.elements,), self.element)

    @property
    def nested(self) -> Filled:
        return Filled(self.shape, self.element)

    @property
    def row(self) -> Filled:
        """The elements without dimension 0, which is the rows."""
        return Filled(self.shape[1:], self.element)


class Target(NamedTuple):
    """The version that an example is for."""

    model: str
    signature: Signature
    samples: Sequence[Sample]  # its smallest request


class Body(NamedTuple):
    """The body of an example.

    Args:
        document: JSON, with Filled in place of lists.
        python: an expression that sends it; "": a call that posts `document`.
    """

    document: Any
    python: str = ""


#: a protocol's form of an example; None: the protocol cannot express it
BodyWriter = Callable[[Target], Body | None]


def samples(signature: Signature, trial: TrialInputs) -> list[Sample]:
    """Return the inputs of the smallest request with which the model check ran the model."""
    made = []
    for spec in needed_inputs(signature):
        shape = [trial.size if dim == -1 else dim for dim in spec.shape]
        if signature.batching:
            shape[0] = 1
        made.append(Sample(spec.name, spec.datatype, tuple(shape), _element(spec.datatype, trial.fill)))
    return made


def advice(model: str, signature: Signature, trial: TrialInputs | None, write: BodyWriter) -> Mapping[str, Any]:
    """Return the members for an error document: `signature`, and `example` or `example_python` in the form of `write`.

    `trial`: inputs that are known to run; None: there is no example.
    """
    members: dict[str, Any] = {}
    described = described_signature(signature)
    if len(orjson.dumps(described)) <= SIGNATURE_BYTES_MAX:
        members["signature"] = described
    body = None if trial is None else write(Target(model, signature, samples(signature, trial)))
    if body is None:
        return members
    text = "" if body.python else json_text(body.document)
    if text:
        members["example"] = orjson.loads(text)
    else:
        python = body.python or f"requests.post(url, json={python_text(body.document)})"
        if len(python) <= PYTHON_CHARACTERS_MAX:
            members["example_python"] = python
    return members


def described_signature(signature: Signature) -> dict[str, Any]:
    return {"inputs": list(map(_described, signature.inputs)), "outputs": list(map(_described, signature.outputs))}


def _described(spec: TensorSpec) -> dict[str, Any]:
    described: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    return described | {"optional": True} if spec.optional else described


def json_text(document: Any, bytes_max: int = EXAMPLE_BYTES_MAX) -> str:
    """Return `document` as JSON; "" if that is longer than `bytes_max`."""
    if _elements(document) > _ELEMENTS_MAX:
        return ""
    text = orjson.dumps(_plain(document))
    return text.decode() if len(text) <= bytes_max else ""


def python_text(document: Any) -> str:
    """Return `document` as a Python expression."""
    if isinstance(document, Filled):
        return document.python()
    if isinstance(document, dict):
        return "{" + ", ".join(f"{name!r}: {python_text(value)}" for name, value in document.items()) + "}"
    if isinstance(document, list):
        return "[" + ", ".join(map(python_text, document)) + "]"
    return repr(document)


def _plain(document: Any) -> Any:
    if isinstance(document, Filled):
        return document.value()
    if isinstance(document, dict):
        return {name: _plain(value) for name, value in document.items()}
    return list(map(_plain, document)) if isinstance(document, list) else document


def _elements(document: Any) -> int:
    if isinstance(document, Filled):
        return prod(dim or 1 for dim in document.shape)  # the lists around no elements count, too
    if isinstance(document, dict):
        return sum(map(_elements, document.values()))
    return sum(map(_elements, document)) if isinstance(document, list) else 1


def _element(datatype: str, fill: int) -> Any:
    if datatype == BYTES:
        return str(fill)
    if datatype == "BOOL":
        return bool(fill)
    return float(fill) if datatype in FLOATS else fill


# --- forms that several protocols share ---


def rows_body(target: Target) -> Body | None:
    """Return the row form, {"instances": [...]}; the column form for versions that do not batch.

    None where a dimension of 0 hides the dimensions within it.
    """
    if any(0 in sample.shape[:-1] for sample in target.samples):
        return None
    single = len(target.signature.inputs) == 1
    if target.signature.batching:
        row = target.samples[0].row if single else {sample.name: sample.row for sample in target.samples}
        return Body({"instances": [row]})
    return Body({"inputs": _columns(target)})


def value_body(target: Target) -> Body | None:
    """Return the tensor of the only input, or the tensors of all by name.

    None where a dimension is 0: readers of this form tell the rows by the nesting, which then shows less.
    """
    return None if any(0 in sample.shape for sample in target.samples) else Body(_columns(target))


def _columns(target: Target) -> Any:
    if len(target.signature.inputs) == 1:
        return target.samples[0].nested
    return {sample.name: sample.nested for sample in target.samples}


_SPECIAL = frozenset({"id", "parameters"})  # members of a generate request that are no inputs


def infer_body(target: Target) -> Body:
    """Return a v2 request. If an input has no JSON form (FP16, BF16), all inputs are binary."""
    if any(sample.datatype in BINARY_ONLY for sample in target.samples):
        return _binary_body(target)
    return Body({"inputs": [_tensor(sample) | {"data": sample.flat} for sample in target.samples], **_outputs(target)})


def generate_body(target: Target) -> Body | None:
    """Return a generate request; None if its members cannot name the inputs, or their nesting does not show shapes."""
    names = {sample.name for sample in target.samples}
    if names & _SPECIAL or any(0 in sample.shape for sample in target.samples):
        return None
    return Body({sample.name: sample.nested for sample in target.samples})


def raw_element(sample: Sample) -> bytes:
    """Return one element of a sample in raw form."""
    if sample.datatype == BYTES:
        return encode_elements([sample.element.encode()])
    if sample.datatype == "BF16":
        return (0x3F80 if sample.element else 0).to_bytes(2, "little")
    return np.array(sample.element, NUMPY[sample.datatype]).tobytes()


def _binary_body(target: Target) -> Body:
    document = {
        "inputs": [
            _tensor(sample) | {"parameters": {"binary_data_size": sample.elements * len(raw_element(sample))}}
            for sample in target.samples
        ],
        **_outputs(target),
    }
    head = orjson.dumps(document)
    tensors = " + ".join(f"{raw_element(sample)!r} * {sample.elements}" for sample in target.samples)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Body(document, f"requests.post(url, data={head!r} + {tensors}, headers={headers!r})")


def _outputs(target: Target) -> dict[str, Any]:
    """Return the parameter that asks for binary outputs, if an output has no JSON form."""
    binary = any(spec.datatype in BINARY_ONLY for spec in target.signature.outputs)
    return {"parameters": {"binary_data_output": True}} if binary else {}


def _tensor(sample: Sample) -> dict[str, Any]:
    return {"name": sample.name, "datatype": sample.datatype, "shape": list(sample.shape)}
