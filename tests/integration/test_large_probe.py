"""A version with large inputs of fixed shape is not probed with them every half second, and is ready all the same."""

from __future__ import annotations

from pathlib import Path

from millstream.gateway.scheduling.readiness import PROBE_BYTES_MAX, probe_bytes, zero_inputs
from millstream.services.model.signature import Signature, TensorSpec
from tests.kit import models
from tests.kit.stack import running_stack
from tests.kit.wait import wait_until

_COLUMNS = PROBE_BYTES_MAX // 4 + 1


def test_a_large_fixed_input_is_ready_without_a_probe(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        stack.push("large", models.identity(tmp_path / "large.onnx", "FP32", (1, _COLUMNS)))
        wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200, what="ready")
        wait_until(lambda: stack.http.get("/v2/models/large/ready").status_code == 200, what="the model is ready")
        sent = stack.metrics().value("millstream_segment_bytes_total", direction="gateway_out")
        assert sent < PROBE_BYTES_MAX, "no probe was sent"


def test_what_a_probe_weighs() -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="a", datatype="FP64", shape=(-1, 3, -1)),
            TensorSpec(name="b", datatype="BYTES", shape=(-1, 5)),
            TensorSpec(name="c", datatype="FP32", shape=(-1, 1000), optional=True),
        ),
        outputs=(),
        batching=True,
    )
    assert probe_bytes(signature) == max(tensor.size_bytes for tensor in zero_inputs(signature)) == 24
