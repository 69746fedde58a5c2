"""Tensors of recordings equal what soundfile, soxr and numpy make, and recordings that cannot be right are refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr

from millstream.plugins.prepare.audio import audio_tensor, is_recording
from millstream.services.errors import Failure
from millstream.services.model.preparation import AudioPlan, AudioSteps, audio_plan
from millstream.services.model.signature import TensorSpec


def plan(datatype: str = "FP32", shape: tuple[int, ...] = (-1, -1), **steps: Any) -> AudioPlan:
    return audio_plan(AudioSteps(**{"rate": 16_000, **steps}), TensorSpec(name="x", datatype=datatype, shape=shape))


def tone(rate: int, seconds: float = 0.5, channels: int = 1) -> np.ndarray[Any, Any]:
    time = np.arange(int(rate * seconds)) / rate
    both = [0.5 * np.sin(2 * np.pi * 440 * (at + 1) * time) for at in range(channels)]
    return np.stack(both, 1).astype(np.float32)


def saved(samples: np.ndarray[Any, Any], rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", None), ("MP3", None)]
)
def test_a_recording_of_each_format(kind: str, subtype: str | None) -> None:
    content = saved(tone(16_000), 16_000, kind, subtype)
    assert is_recording(content)
    wanted, _ = soundfile.read(io.BytesIO(content), dtype="float32")
    made = audio_tensor(plan(), content)
    assert (made.shape, made.dtype) == ((1, len(wanted)), np.float32)
    np.testing.assert_allclose(made[0], wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(made[0][2000:6000], tone(16_000)[2000:6000, 0], atol=0.05)


def test_channels_are_mixed_and_the_rate_is_the_models() -> None:
    stereo = tone(44_100, channels=2)
    made = audio_tensor(plan(), saved(stereo, 44_100, subtype="FLOAT"))
    np.testing.assert_allclose(made[0], soxr.resample(stereo.mean(axis=1), 44_100, 16_000), atol=1e-6)
    assert made.shape == (1, 8000)
    np.testing.assert_allclose(made[0][500:-500], tone(16_000, channels=2).mean(axis=1)[500:-500], atol=2e-3)


def test_shapes_and_normalisation() -> None:
    content = saved(tone(16_000, 0.1), 16_000, subtype="FLOAT")
    made = audio_tensor(plan(normalize=True), content)
    samples = tone(16_000, 0.1)[:, 0]
    np.testing.assert_allclose(
        made[0], (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7), rtol=1e-4, atol=1e-5
    )
    padded = audio_tensor(plan("FP16", (-1, 1, 2000)), content)
    assert (padded.shape, padded.dtype) == ((1, 1, 2000), np.float16)
    assert not padded[0, 0, 1600:].any()
    with pytest.raises(Failure, match="has 1600 samples at 16000 Hz: the model takes 1000"):
        audio_tensor(plan(shape=(-1, 1000)), content)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"RIFF....WAVE", "no recording of a known format"),
        (saved(tone(16_000, 2.0), 16_000), "has 2.0 seconds: at most 1"),
        (saved(tone(16_000, 0), 16_000), "is cut short: it has 0 samples"),
        (saved(tone(16_000), 16_000, "AIFF"), "is AIFF"),
        (saved(np.full((800, 1), np.nan, np.float32), 16_000, subtype="FLOAT"), "values that are no numbers"),
        (saved(tone(16_000), 16_000, "FLAC")[:2000], "recording"),
    ],
)
def test_recordings_that_are_refused(content: bytes, error: str) -> None:
    with pytest.raises(Failure, match=error):
        audio_tensor(plan(seconds_max=1), content)


@pytest.mark.parametrize(
    ("datatype", "shape", "error"),
    [("INT16", (-1, -1), r"x\.audio: the input is INT16"), ("FP32", (-1, 2, 80), r"x\.audio: the input has the shape")],
)
def test_inputs_that_are_no_recordings(datatype: str, shape: tuple[int, ...], error: str) -> None:
    with pytest.raises(Failure, match=error):
        plan(datatype, shape)


def test_first_bytes() -> None:
    assert is_recording(bytes([0xFF, 0xFB, 0x90, 0x00]))
    for other in (b"\xff\xd8\xff\xe0", b"\x89PNG", b"", b"\xff\xfb\xf0\x00", b"RIFF....AVI "):
        assert not is_recording(other)
