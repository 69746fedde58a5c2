"""Reads how a folder of Hugging Face prepares its input: preprocessor_config.json ─> the steps of a version. Pure.

Only processors whose steps are known here are read: another one would answer something else.
Source: transformers, image_processing_*: the classes' own order is resize, crop, rescale, normalise;
feature_extraction_wav2vec2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from millstream.plugins.convert.base import read_json
from millstream.services.errors import invalid
from millstream.services.model.preparation import Preparation

PROCESSOR = "preprocessor_config.json"
PIXELS, SAMPLES = "pixel_values", "input_values"
_WAVES = "Wav2Vec2"  # samples as they are: other feature extractors make spectrograms
_DOCUMENT_BYTES_MAX = 1 << 20
#: a `size` of one number is height and width
_SQUARE = frozenset({"ViT", "DeiT", "Beit", "Siglip", "Segformer", "Pvt"})
#: a `size` of one number is the shorter side
_SHORTER = frozenset({"CLIP", "ChineseCLIP", "ConvNext", "Bit", "MobileNetV1", "MobileNetV2"})
_RESAMPLE = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
_WARPED_FROM = 384  # ConvNext stretches images for models of this size and more


def steps_of(folder: Path, given: str) -> tuple[dict[str, Preparation], str]:
    """Return what prepares the input `given`, PIXELS or SAMPLES, and why nothing does: "" if something does.

    Raises Failure(INVALID).
    """
    what = "images" if given == PIXELS else "recordings"
    path = folder / PROCESSOR
    if not path.is_file():
        return {}, f"The folder has no {PROCESSOR}, so the model takes tensors and no {what}."
    document = read_json(path, _DOCUMENT_BYTES_MAX)
    document = document if isinstance(document, dict) else {}
    named = document.get("image_processor_type") or document.get("feature_extractor_type") or ""
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(named))
    if kind not in (_SQUARE | _SHORTER if given == PIXELS else {_WAVES}):
        return (
            {},
            f"{PROCESSOR} names {str(named)[:80]!a}, which is not known here: the model takes tensors, no {what}.",
        )
    try:
        steps = {"image": _steps(kind, document)} if given == PIXELS else {"audio": _waves(document)}
        return {given: Preparation.model_validate(steps)}, ""
    except (ValidationError, TypeError, ValueError, KeyError, IndexError) as error:
        text = " ".join(str(error).split())[:200]
        raise invalid(f"{PROCESSOR} cannot be read: {text}") from error


def _steps(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    steps: dict[str, Any] = {"channels": 3}
    if document.get("do_resize", True):
        steps |= _resize(kind, document)
    if document.get("do_center_crop", False):
        steps["crop"] = _size(document["crop_size"])
    rescaled = document.get("do_rescale", True)
    steps["scale"] = document.get("rescale_factor", 1 / 255) if rescaled else 1.0
    if document.get("do_normalize", True):
        steps |= {"mean": document["image_mean"], "std": document["image_std"]}
    return steps


def _waves(document: Mapping[str, Any]) -> dict[str, Any]:
    if document.get("feature_size", 1) != 1:
        raise ValueError(f"feature_size is {str(document['feature_size'])[:80]}: 1 is known")
    return {"rate": document["sampling_rate"], "normalize": document.get("do_normalize", True)}


def _resize(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    steps: dict[str, Any] = {"resample": _RESAMPLE[int(document["resample"])]}
    size = document["size"]
    if isinstance(size, int):
        size = {"height": size, "width": size} if kind in _SQUARE else {"shortest_edge": size}
    if set(size) == {"height", "width"}:
        return {**steps, "resize": _size(size)}
    if set(size) != {"shortest_edge"}:
        raise ValueError(f"size is {str(size)[:80]}: height and width, or shortest_edge, are known")
    shorter = int(size["shortest_edge"])
    if kind != "ConvNext":
        return {**steps, "resize": shorter}
    square = {"height": shorter, "width": shorter}
    if shorter >= _WARPED_FROM:
        return {**steps, "resize": square}
    return {**steps, "resize": int(shorter / float(document["crop_pct"])), "crop": square}


def _size(size: Any) -> dict[str, int]:
    if isinstance(size, int):
        return {"height": size, "width": size}
    return {"height": int(size["height"]), "width": int(size["width"])}
