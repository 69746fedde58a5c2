"""The steps of folders of Hugging Face make the tensors that transformers' own processors make."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from millstream.plugins.convert.huggingface_processors import PIXELS, SAMPLES, steps_of
from millstream.plugins.prepare.image import image_tensor
from millstream.services.model.preparation import image_plan
from millstream.services.model.signature import TensorSpec

SIZES = [(320, 240), (200, 333), (224, 224), (97, 500)]
PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {}),
    ("DeiT", {}),
    ("Beit", {}),
    ("Siglip", {}),
    ("Segformer", {}),
    ("CLIP", {}),
    ("ConvNext", {"size": {"shortest_edge": 224}}),
    ("ConvNext", {"size": {"shortest_edge": 384}}),
    ("Bit", {}),
    ("MobileNetV1", {}),
    ("MobileNetV2", {}),
    ("Pvt", {}),
]


@pytest.mark.parametrize(("kind", "options"), PROCESSORS, ids=[f"{kind} {options}" for kind, options in PROCESSORS])
def test_images_are_prepared_as_by_transformers(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    module = getattr(transformers, f"{kind}ImageProcessorPil", None) or getattr(transformers, f"{kind}ImageProcessor")
    processor = module(**options)
    processor.save_pretrained(tmp_path)
    prepare, why = steps_of(tmp_path, PIXELS)
    assert not why
    steps = prepare[PIXELS].image
    assert steps is not None
    plan = image_plan(steps, TensorSpec(name=PIXELS, datatype="FP32", shape=(-1, 3, -1, -1)))
    for at, size in enumerate(SIZES):
        coarse = np.random.default_rng(at).integers(0, 256, (9, 7, 3), np.uint8)
        picture = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        picture.save(file, "PNG")
        wanted = processor(picture, return_tensors="np")[PIXELS]
        np.testing.assert_allclose(image_tensor(plan, file.getvalue()), wanted, rtol=0, atol=1e-5)


def test_the_rate_and_normalisation_of_recordings(tmp_path: Path) -> None:
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000, do_normalize=True).save_pretrained(tmp_path)
    prepare, why = steps_of(tmp_path, SAMPLES)
    assert not why
    steps = prepare[SAMPLES].audio
    assert steps is not None
    assert (steps.rate, steps.normalize) == (8000, True)


def test_a_processor_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    transformers.WhisperFeatureExtractor().save_pretrained(tmp_path)
    prepare, why = steps_of(tmp_path, SAMPLES)
    assert not prepare
    assert "WhisperFeatureExtractor" in why
