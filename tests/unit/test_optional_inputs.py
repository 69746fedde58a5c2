"""Inputs that a request may leave out: read, never mixed with requests that bring them, and absent in the worker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.readiness import zero_inputs
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.v2.decode import V2Decoder
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import decode_batch
from millstream.workers.batches.lease import Lease, input_arrays
from tests.kit import v2
from tests.kit.responders import DISCARD

X = TensorSpec(name="x", datatype="FP32", shape=(-1, 2))
BIAS = TensorSpec(name="bias", datatype="FP32", shape=(-1,), optional=True)
Y = TensorSpec(name="y", datatype="FP32", shape=(-1, 2))
SIGNATURE = Signature(inputs=(BIAS, X), outputs=(Y,), batching=True)
ROW = np.ones((1, 2), np.float32)


def decoder(signature: Signature = SIGNATURE) -> V2Decoder:
    return V2Decoder(InputPlans("m", signature, 8), 1 << 20)


@pytest.mark.parametrize("binary", [True, False])
def test_a_request_may_leave_it_out_again_and_again(binary: bool) -> None:
    read = decoder()
    without, headers = v2.request({"x": ROW}, binary=binary)
    both, lengths = v2.request({"x": ROW, "bias": np.ones(1, np.float32)}, binary=binary)
    for _ in range(3):  # known envelopes, too
        for body, head in ((without, headers), (both, lengths)):
            length = head.get(v2.LENGTH)
            call = read.decode(body, None if length is None else int(length))
            assert call.options.rows == 1
            assert (call.inputs[0].shape, len(call.inputs[0].data)) == (
                (ABSENT.shape, 0) if body is without else ((1,), 4)
            )
            assert bytes(call.inputs[1].data) == ROW.tobytes()


def test_what_is_not_optional_is_still_missed() -> None:
    body, _ = v2.request({"bias": np.ones(1, np.float32)}, binary=False)
    with pytest.raises(
        Failure, match=r"expected between 1 and 2 inputs but got 1 .* missing required input\(s\) \['x'\]"
    ):
        decoder().decode(body, None)
    with pytest.raises(Failure, match="got 0 inputs"):
        decoder().decode(b'{"inputs":[]}', None)


def test_a_request_without_any_input_is_one_where_nothing_else_tells_its_rows() -> None:
    lone = Signature(inputs=(BIAS.model_copy(update={"shape": (2,)}),), outputs=(Y,), batching=False)
    for _ in range(2):
        assert decoder(lone).decode(b'{"inputs":[]}', None).inputs == [ABSENT]
    with pytest.raises(Failure, match="missing required"):
        decoder(Signature(inputs=(BIAS,), outputs=(Y,), batching=True)).decode(b'{"inputs":[]}', None)


def lease_of(*inputs: InputTensor) -> Lease:
    request = Request(inputs, 1, 0, 0.0, 60.0, DISCARD)
    packed = Packer(SIGNATURE, None, 1 << 20).pack("g-1", b"r", [request], 0.0, 0.0)
    return Lease("lane", b"1-0", packed.entry, 1)


def test_a_worker_sees_only_what_is_there_and_merges_like_with_like() -> None:
    x, bias = InputTensor((1, 2), ROW.tobytes(), 8), InputTensor((1,), b"\0\0\x80?", 4)
    segments = Segments(Path("/dev/shm"))
    assert list(input_arrays(lease_of(ABSENT, x), SIGNATURE, segments)) == ["x"]
    arrays = input_arrays(lease_of(bias, x), SIGNATURE, segments)
    assert {name: array.tolist() for name, array in arrays.items()} == {"bias": [1.0], "x": [[1.0, 1.0]]}
    shapes = [[tensor.inner for tensor in lease_of(first, x).header.inputs] for first in (ABSENT, bias)]
    assert shapes[0] != shapes[1]


def test_made_up_requests_leave_it_out() -> None:
    assert zero_inputs(SIGNATURE)[0] is ABSENT
    assert [spec.name for spec in needed_inputs(SIGNATURE)] == ["x"]
    assert [spec.name for spec in needed_inputs(Signature(inputs=(BIAS,), outputs=(Y,), batching=True))] == ["bias"]
    packed = Packer(SIGNATURE, None, 1 << 20).pack(
        "g", b"r", [Request(zero_inputs(SIGNATURE), 1, 0, 0.0, 1.0, DISCARD)], 0.0, 0.0
    )
    assert decode_batch(packed.entry)[0].inputs[0].inner == (-1,)


@pytest.mark.parametrize("model_shape", [(3,), (2, 2), (-1,), (2, -1)])
def test_a_models_own_shape_has_as_many_elements(model_shape: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="differ in size"):
        Signature(inputs=(X.model_copy(update={"model_shape": model_shape}),), outputs=(Y,), batching=True)
