"""The small v2 documents."""

from __future__ import annotations

import subprocess
import sys

import orjson
import pytest

from millstream.gateway.connection.error_reply import error_body
from millstream.gateway.v2.schemas import EXTENSIONS, model_metadata, server_metadata
from millstream.services.environment import child_environment
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.model.signature import Signature, TensorSpec


def test_server_metadata() -> None:
    assert server_metadata("1.2.3", EXTENSIONS) == {
        "name": "triton",
        "version": "1.2.3",
        "extensions": list(EXTENSIONS),
    }


def test_model_metadata() -> None:
    signature = Signature(
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 64)),),
        outputs=(TensorSpec(name="y", datatype="INT64", shape=(-1,)),),
        batching=True,
    )
    manifest = Manifest(
        model="digits",
        version=3,
        created=0,
        digest="d",
        served="source/model.onnx",
        files=(),
        signature=signature,
        config=ModelConfig(),
        opset=17,
        ir_version=8,
    )
    assert orjson.loads(orjson.dumps(model_metadata(manifest, [2, 3]))) == {
        "name": "digits",
        "versions": ["2", "3"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}],
        "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
    }


def test_error_body() -> None:
    assert error_body('no "x"') == b'{"error":"no \\"x\\""}'
    assert orjson.loads(error_body("é \ud800")) == {"error": "é \\ud800"}


@pytest.mark.plugins
@pytest.mark.parametrize(("chosen", "listed"), [("all", True), ("-triton", False)])
def test_the_extensions_of_a_plug_in_are_listed_while_it_is_on(chosen: str, listed: bool) -> None:
    code = "from millstream.gateway.v2.schemas import extensions; print(*extensions())"
    environment = child_environment({"MILLSTREAM_PLUGINS": chosen})
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert set(EXTENSIONS) <= set(found)
    assert ("system_shared_memory" in found) is ("statistics" in found) is listed
