"""Decodes a recording and makes a tensor of it, as the steps of a version say. Pure; it needs soundfile and soxr.

bytes ─> open: channels, length ─> samples from -1 to 1 ─> mono: the mean of the channels ─> the model's rate ─> tensor
Source of `normalize`: transformers, Wav2Vec2FeatureExtractor.zero_mean_unit_var_norm.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from millstream.services.errors import invalid
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.preparation import AudioPlan

Array = np.ndarray[Any, Any]

#: samples of all channels that are decoded; each takes 4 bytes, a few times over
SAMPLES_MAX = 64 << 20
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
RECORDINGS = frozenset(
    {
        "audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave", "audio/flac", "audio/x-flac", "audio/ogg",
        "audio/mpeg", "audio/mp3",
    }
)  # fmt: skip
#: how libsndfile calls these
_KINDS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG"})
_MAGIC = (b"fLaC", b"OggS", b"ID3")
_HEAD_BYTES = 12
_TINY = 1e-7


def is_recording(content: bytes | memoryview) -> bool:
    """Return whether bytes begin as a recording does whose format is decoded here."""
    head = bytes(content[:_HEAD_BYTES])
    if head.startswith(_MAGIC):
        return True
    if head[:4] in {b"RIFF", b"RF64"}:
        return head[8:12] == b"WAVE"
    # A frame of MP3: eleven bits of sync, layer III, and a bit rate and a sample rate that there are.
    return len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[2] >> 4 != 15 and head[2] & 0xC != 0xC


def audio_tensor(plan: AudioPlan, content: bytes) -> Array:
    """Return (1, samples), or (1, 1, samples), of an encoded recording. Raises Failure(INVALID)."""
    import soxr

    samples, rate = _decoded(plan, content)
    if rate != plan.rate:
        samples = soxr.resample(samples, rate, plan.rate)
    if plan.normalize:
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + _TINY)
    if plan.samples is not None:
        if len(samples) > plan.samples:
            raise invalid(f"the recording has {len(samples)} samples at {plan.rate} Hz: the model takes {plan.samples}")
        samples = np.pad(samples, (0, plan.samples - len(samples)))
    made: Array = np.ascontiguousarray(samples, NUMPY[plan.datatype])
    return made.reshape((1,) * (plan.rank - 1) + (len(made),))


def _decoded(plan: AudioPlan, content: bytes) -> tuple[Array, int]:
    """Return the samples of a recording in FP32, mixed to one channel, and its rate."""
    import soundfile

    try:
        file = soundfile.SoundFile(io.BytesIO(content))
    except Exception:  # libsndfile's texts say no more
        raise invalid(f"the bytes are no recording of a known format: {', '.join(FORMATS)}") from None
    with file:
        if file.format not in _KINDS:
            raise invalid(f"the recording is {file.format}: {', '.join(FORMATS)} are decoded")
        seconds = file.frames / file.samplerate
        if seconds > plan.seconds_max:
            raise invalid(f"the recording has {seconds:.1f} seconds: at most {plan.seconds_max:g}")
        if file.frames * file.channels > SAMPLES_MAX:
            raise invalid(f"the recording has {file.frames} samples of {file.channels} channels: at most {SAMPLES_MAX}")
        wanted, rate = file.frames, file.samplerate
        try:
            samples = file.read(dtype="float32", always_2d=True)
        except Exception as error:
            raise invalid(f"the recording cannot be decoded: {' '.join(str(error).split())[:200]}") from None
    if not len(samples) or len(samples) < wanted:
        raise invalid(f"the recording is cut short: it has {len(samples)} samples of {wanted}")
    if not np.isfinite(samples).all():
        raise invalid("the recording has values that are no numbers")
    return samples.mean(axis=1), rate
