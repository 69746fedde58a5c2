"""Whatever is sent to the protocols beside v2, reading it ends in inputs that fit the signature, or in a refusal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.gateway.tensors import forms
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.rows_json import read_predict
from millstream.plugins.compat.openai import request as openai
from millstream.plugins.compat.openai.embedder import embedder
from millstream.plugins.compat.tfserving.cloud_events import open_event
from millstream.plugins.compat.tfserving.predict import read_document, read_examples
from millstream.plugins.compat.torchserve import predictions
from millstream.plugins.compat.torchserve.predictions import parts_of
from millstream.plugins.compat.triton import generate
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature, TensorSpec


def plans(*inputs: tuple[str, str, tuple[int, ...]], batching: bool = True) -> InputPlans:
    specs = tuple(TensorSpec(name=name, datatype=datatype, shape=shape) for name, datatype, shape in inputs)
    output = TensorSpec(name="y", datatype="FP32", shape=(-1, 2))
    return InputPlans("m", Signature(inputs=specs, outputs=(output,), batching=batching), 8)


PLANS = [
    plans(("x", "FP32", (-1, 2))),
    plans(("x", "INT8", (-1,))),
    plans(("x", "BOOL", (-1, -1))),
    plans(("x", "BF16", (-1, 2, 2))),
    plans(("x", "BYTES", (-1, 1))),
    plans(("x", "FP64", ()), batching=False),
    plans(("x", "FP32", (-1, 2)), ("input_ids", "INT64", (-1, -1))),
    plans(("input_ids", "INT64", (-1, -1)), ("attention_mask", "INT64", (-1, -1))),
]
KEYS = st.sampled_from(
    [
        "x",
        "input_ids",
        "instances",
        "inputs",
        "examples",
        "context",
        "data",
        "body",
        "b64",
        "id",
        "parameters",
        "input",
        "model",
        "encoding_format",
        "dimensions",
        "signature_name",
        "timeout",
        "priority",
        "user",
        "specversion",
        "name",
    ]
) | st.text(max_size=3)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["", "YQ==", "a", "\ud800", "base64", "m"])
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
DOCUMENTS = VALUES | st.dictionaries(KEYS, VALUES, min_size=1, max_size=5)
TYPES = st.sampled_from(
    [
        "",
        "application/json",
        "application/jsonlines",
        "text/csv",
        "text/csv; header=present",
        "application/x-npy",
        "application/octet-stream",
        "image/png",
        "multipart/form-data; boundary=B",
        "multipart/form-data",
        "text/plain",
        "application/cloudevents+json",
    ]
)


def fits(of: InputPlans, inputs: Inputs) -> None:
    for plan, tensor in zip(of, inputs.tensors, strict=True):
        assert plan.fit(plan.datatype, tensor.shape).size_bytes in {-1, tensor.size_bytes}
        data = tensor.data
        assert (data.nbytes if isinstance(data, np.ndarray) else len(data)) == tensor.size_bytes


def refused_or_read(of: InputPlans, content_type: str, body: bytes) -> None:
    """By every reader. A refusal is the caller's fault, and one line."""

    def predicted() -> None:
        document = read_document(open_event({"content-type": content_type}, body)[1])
        fits(of, read_predict(of, document)[0])

    def classified() -> None:
        fits(of, read_examples(of, read_document(body)))

    def invoked() -> None:
        fits(of, forms.reader(content_type)(of, body).inputs)

    def tried() -> None:
        fits(of, predictions.read(of, content_type, body).inputs)

    def generated() -> None:
        fits(of, generate.read(of, body).inputs)

    def embedded() -> None:
        fits(of, asyncio.run(embedder(of).inputs(openai.read(body).entries))[0])

    for read in (predicted, classified, invoked, tried, generated, embedded):
        try:
            read()
        except Failure as failure:
            assert failure.code in {Code.INVALID, Code.ENCODING, Code.TOO_LARGE}
            assert len(failure.message) < 2000


@given(of=st.sampled_from(PLANS), content_type=TYPES, document=DOCUMENTS)
@example(of=PLANS[0], content_type="application/json", document={"signature_name": [], "encoding_format": {}})
@example(of=PLANS[0], content_type="application/json", document={"x": [[1, 2], [3]], "instances": [{}, {}]})
def test_any_json(of: InputPlans, content_type: str, document: Any) -> None:
    refused_or_read(of, content_type, json.dumps(document).encode())


@given(of=st.sampled_from(PLANS), content_type=TYPES, body=st.binary(max_size=200))
def test_any_bytes(of: InputPlans, content_type: str, body: bytes) -> None:
    refused_or_read(of, content_type, body)
    if body:
        refused_or_read(of, content_type, b"\x93NUMPY\x01\x00" + body)


PIECES = st.lists(
    st.sampled_from(
        [
            b"--B",
            b"\r\n",
            b"--",
            b'Content-Disposition: form-data; name="x"',
            b"Content-Disposition:",
            b"[1, 2]",
            b"\x00",
            b'name="data"',
            b":",
            b"\n",
            b";",
            b"B",
            b'Content-Disposition: form-data; name="data"; filename="a"',
            b"\xff",
        ]
    ),
    max_size=14,
).map(b"".join)


@given(of=st.sampled_from(PLANS), body=PIECES)
def test_any_form(of: InputPlans, body: bytes) -> None:
    refused_or_read(of, "multipart/form-data; boundary=B", body)


@given(parts=st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.binary(max_size=30), max_size=5))
def test_forms_come_back_as_they_were_sent(parts: dict[str, bytes]) -> None:
    body = b"".join(
        b'--BOUND\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), part)
        for name, part in parts.items()
        if b"BOUND" not in part
    )
    if body:
        assert parts_of("multipart/form-data; boundary=BOUND", body + b"--BOUND--\r\n") == parts
