"""Encoded recordings as inputs, over the protocols that images take, too."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from millstream import Client
from tests.kit import models
from tests.kit.stack import Stack

TONE = (0.5 * np.sin(np.arange(22_050) * 0.1)).astype(np.float32)
POWER = float(np.mean(np.square(soxr.resample(TONE, 22_050, 16_000))))


def recording(kind: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, TONE, 22_050, format=kind)
    return file.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = models.loudness(tmp_path_factory.mktemp("models") / "loudness.onnx")
    shared_stack.push("au-power", model, config='{"prepare": {"input_values": {"audio": {"rate": 16000}}}}')


@pytest.mark.parametrize(
    ("kind", "media"), [("WAV", "audio/wav"), ("FLAC", "audio/flac"), ("OGG", "audio/ogg"), ("MP3", "audio/mpeg")]
)
def test_a_body_that_is_one_recording(stack: Stack, kind: str, media: str) -> None:
    for path in ("/predictions/au-power", "/endpoints/au-power/invocations"):
        reply = stack.http.post(path, content=recording(kind), headers={"Content-Type": media})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        np.testing.assert_allclose(
            np.ravel(found if isinstance(found, list) else found["predictions"]), [POWER], rtol=0.02
        )


def test_v2_and_the_client(stack: Stack, tmp_path: Path) -> None:
    text = base64.b64encode(recording("FLAC")).decode()
    body = {"inputs": [{"name": "audio", "datatype": "BYTES", "shape": [2], "data": [text, text]}]}
    reply = stack.http.post("/v2/models/au-power/infer", json=body)
    np.testing.assert_allclose(reply.json()["outputs"][0]["data"], [POWER] * 2, rtol=1e-3)
    path = tmp_path / "tone.wav"
    path.write_bytes(recording("WAV"))
    with Client(stack.url) as client:
        np.testing.assert_allclose(client.predict("au-power", path)["power"], [[POWER]], rtol=1e-3)
    body["inputs"][0] |= {"shape": [1], "data": [base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()]}
    reply = stack.http.post("/v2/models/au-power/infer", json=body)
    assert reply.status_code == 400
    assert "'audio[0]' is no recording of a known format" in reply.json()["error"]
    usage = stack.http.get("/v2/models/au-power").json()["parameters"]["usage"]
    assert (usage["kind"], usage["encoded"]) == ("audio", {"input_values": "audio"})
