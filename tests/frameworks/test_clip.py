"""CLIP with a text and an image in one request: `pre` and `post` beside its one model, as transformers answers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from millstream.client.client import Client
from tests.kit.stack import Stack, running_stack, token_of

pytestmark = [pytest.mark.frameworks]

WORDS = ["<pad>", "<start>", "<end>", "a", "red", "blue", "square", "on", "white"]
TOKENS, SIDE = 16, 32
SERVICE = """
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

tokens = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pre(text: str, image: Image.Image) -> dict[str, NDArray]:
    encoded = tokens.encode(text)
    pixels = np.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC), np.float32) / 255
    return {
        "input_ids": np.array(encoded.ids),
        "attention_mask": np.array(encoded.attention_mask),
        "pixel_values": ((pixels - MEAN) / STD).transpose(2, 0, 1),
    }


class Compared(NamedTuple):
    similarity: float
    text_embedding: list[float]


def post(text_embeds: NDArray, image_embeds: NDArray) -> Compared:
    return Compared(float(text_embeds @ image_embeds), [*text_embeds])
"""


class Both(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, pixel_values: Any) -> Any:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, pixel_values=pixel_values)
        return found.text_embeds, found.image_embeds


@pytest.fixture(scope="module")
def clip() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_tokens = {"vocab_size": len(WORDS), "max_position_embeddings": TOKENS, "pad_token_id": 0}
    of_tokens |= {"bos_token_id": 1, "eos_token_id": 2}
    of_pixels = {"image_size": SIDE, "patch_size": 8, "num_channels": 3}
    model: Any = CLIPModel(
        CLIPConfig(text_config=sizes | of_tokens, vision_config=sizes | of_pixels, projection_dim=16)
    )
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, clip: Any) -> Path:
    path = tmp_path_factory.mktemp("clip")
    made: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    made.enable_padding(length=TOKENS, pad_id=0, pad_token="<pad>")
    made.save(str(path / "tokenizer.json"))
    (path / "service.py").write_text(SERVICE)
    ids = torch.full((2, TOKENS), 2)
    names = ["input_ids", "attention_mask", "pixel_values"]
    outputs = ["text_embeds", "image_embeds"]
    rows = {name: {0: "rows"} for name in (*names, *outputs)}
    given = (ids, torch.ones_like(ids), torch.zeros(2, 3, SIDE, SIDE))
    with warnings.catch_warnings(action="ignore"):  # of the exporter, about itself and about constants of the trace
        torch.onnx.export(
            Both(clip), given, str(path / "model.onnx"), dynamo=False, opset_version=17, input_names=names,
            output_names=outputs, dynamic_axes=rows,
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def stack(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("served") / "home") as running:
        with Client(f"http://127.0.0.1:{running.port}", key=token_of(running.home)) as client:
            client.push("clip", folder, wait_s=120)
        yield running


def test_texts_and_images_are_compared_in_one_request(stack: Stack, folder: Path, clip: Any) -> None:
    texts = ["a red square", "a blue square on a white square"]
    pictures = [Image.new("RGB", (64, 64), "red"), Image.effect_noise((90, 50), 80).convert("RGB")]
    with Client(f"http://127.0.0.1:{stack.port}", key=token_of(stack.home)) as client:
        found = client.predict("clip", {"text": texts, "image": pictures})
    encoder = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = encoder.encode_batch(texts)
    steps = {"size": {"height": SIDE, "width": SIDE}, "do_center_crop": False}
    pixels = CLIPImageProcessor(**steps)(pictures, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = clip(
            input_ids=torch.tensor([one.ids for one in encoded]),
            attention_mask=torch.tensor([one.attention_mask for one in encoded]),
            pixel_values=pixels,
        )
    assert np.allclose(found["text_embedding"], expected.text_embeds.numpy(), atol=1e-4)
    similarity = (expected.text_embeds * expected.image_embeds).sum(dim=1).numpy()
    assert np.allclose(found["similarity"], similarity, atol=0.02), "images are resized by Pillow and by torchvision"
