"""Folders of classifiers of images and recordings, written by transformers: pushed, and called with files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from PIL import Image

from millstream.client.client import Client
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LABELS = {0: "cat", 1: "dog", 2: "fish", 3: "bird"}
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "id2label": LABELS,
}
IMAGE_MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (
        lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)),
        lambda: transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}),
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", id2label=LABELS
            )
        ),
        lambda: transformers.ConvNextImageProcessorPil(size={"shortest_edge": 64}, crop_pct=0.875),
    ),
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch.manual_seed(1)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def wanted(logits: Any) -> tuple[str, float]:
    probabilities = logits.softmax(-1)[0]
    return LABELS[int(probabilities.argmax())], float(probabilities.max())


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_images_are_classified_as_by_transformers(client: Client, tmp_path: Path, name: str) -> None:
    made, processed = IMAGE_MODELS[name]
    model, processor = made().eval(), processed()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    document = client.push(name, tmp_path, wait_s=120)
    assert document["state"] == "ready", document
    coarse = np.random.default_rng(4).integers(0, 256, (9, 7, 3), np.uint8)
    picture = Image.fromarray(coarse).resize((120, 90), Image.Resampling.BICUBIC)
    with torch.inference_mode():
        label, score = wanted(model(**processor(picture, return_tensors="pt")).logits)
    answer = client.predict(name, picture)
    assert answer["label"].tolist() == [label.encode()] or answer["label"].tolist() == [label]
    np.testing.assert_allclose(answer["score"], [score], rtol=1e-3)


def test_recordings_are_classified_as_by_transformers(client: Client, tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(8, 8), conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, classifier_proj_size=8, vocab_size=8,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=16_000, do_normalize=True)
    model.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    document = client.push("wav2vec2", tmp_path, wait_s=120)
    assert document["state"] == "ready", document
    samples = (0.4 * np.sin(np.arange(9000) * 0.07)).astype(np.float32)
    with torch.inference_mode():
        label, score = wanted(model(**extractor(samples, sampling_rate=16_000, return_tensors="pt")).logits)
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    answer = client.predict("wav2vec2", file.getvalue())
    assert answer["label"].tolist() == [label.encode()] or answer["label"].tolist() == [label]
    np.testing.assert_allclose(answer["score"], [score], rtol=1e-3)
