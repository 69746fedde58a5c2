"""HTTP/2 clients that stand on other libraries, against the gRPC server on our own connections: h2, nghttp2, curl."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.tools import CLIENTS, program

PROGRAMS = Path(__file__).parent / "programs"
X = np.arange(6, dtype="<f4").reshape(1, 6)
HEADERS = ("content-type: application/grpc", "te: trailers")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("clients")
    with running_stack(folder) as stack:
        stack.push("wide", models.identity(folder / "wide.onnx", shape=("N", "M")))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def message(model: str = "wide", array: np.ndarray = X) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=array.shape)
    return bytes(request.SerializeToString())


def framed(body: bytes) -> bytes:
    return struct.pack(">BI", 0, len(body)) + body


def run(*command: str | Path, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def url(stack: Stack, method: str) -> str:
    return f"http://{stack.grpc}/inference.GRPCInferenceService/{method}"


def check(body: bytes, array: np.ndarray = X) -> None:
    reply = pb.ModelInferResponse.FromString(body)
    assert reply.raw_output_contents[0] == array.tobytes()


@pytest.mark.needs("clients")
def test_grpclib(stack: Stack) -> None:
    host, _, port = stack.grpc.rpartition(":")
    given = json.dumps({"infer": message().hex(), "unknown": message("nothing").hex()})
    client = (CLIENTS / "bin" / "python", "-P", PROGRAMS / "grpclib_client.py")
    found = json.loads(run(*client, host, port, given=given).splitlines()[-1])
    assert len(found["many"]) == 50
    for body in (*found["many"], found["metadata"], found["after"]):
        check(bytes.fromhex(body))
    for body in found["stream"]:
        check(pb.ModelStreamInferResponse.FromString(bytes.fromhex(body)).infer_response.SerializeToString())
    assert len(found["stream"]) == 3
    assert found["error"][0] == "NOT_FOUND"
    assert "'nothing' is not found" in found["error"][1]


@pytest.mark.needs("curl")
@pytest.mark.parametrize("columns", [6, 300_000], ids=["small", "1.2 MB"])
def test_curl(stack: Stack, tmp_path: Path, columns: int) -> None:
    """curl sends a content-length, and large messages in frames as long as the server lets it."""
    x = np.arange(columns, dtype="<f4").reshape(1, columns)
    sent, got, said = tmp_path / "sent", tmp_path / "got", tmp_path / "said"
    sent.write_bytes(framed(message(array=x)))
    command = [program("curl"), "--http2-prior-knowledge", "--silent", "--show-error", "--max-time", "200"]
    command += [word for header in HEADERS for word in ("-H", header)]
    run(*command, "--data-binary", f"@{sent}", "--output", got, "--dump-header", said, url(stack, "ModelInfer"))
    body = got.read_bytes()
    assert struct.unpack(">BI", body[:5]) == (0, len(body) - 5)
    check(body[5:], x)
    assert re.search(r"^HTTP/2 200", said.read_text())
    assert re.search(r"^grpc-status: 0\r?$", said.read_text(), re.MULTILINE)


@pytest.mark.needs("curl")
def test_what_curl_sends_without_thinking_of_grpc_is_refused(stack: Stack) -> None:
    command = [
        program("curl"),
        "--http2-prior-knowledge",
        "--silent",
        "--max-time",
        "200",
        "--write-out",
        "%{http_code}",
    ]
    assert run(*command, url(stack, "ServerLive")) == "405"
    # Without a body: curl forgets an answer that comes while it is still sending.
    json_type = ("-X", "POST", "-H", "content-type: application/json")
    assert run(*command, *json_type, url(stack, "ServerLive")) == "415"


@pytest.mark.needs("h2load")
def test_h2load(stack: Stack, tmp_path: Path) -> None:
    """nghttp2: many calls on few connections, whose header blocks change the table only once."""
    sent = tmp_path / "sent"
    sent.write_bytes(framed(message()))
    command = [program("h2load"), "-n2000", "-c4", "-m20", "-t1", "-d", str(sent)]
    said = run(*command, *[word for header in HEADERS for word in ("-H", header)], url(stack, "ModelInfer"))
    assert "2000 succeeded, 0 failed, 0 errored, 0 timeout" in said, said
    assert "2000 2xx" in said, said
