"""Which steps of a configuration fit which inputs, and what the errors name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from millstream.services.errors import Failure
from millstream.services.model.preparation import ImageSteps, Preparation, check_preparation, image_plan
from millstream.services.model.signature import Signature, TensorSpec


def spec(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name="pixels", datatype=datatype, shape=shape)


def steps(**fields: Any) -> ImageSteps:
    return ImageSteps.model_validate(fields)


def test_the_shape_decides_what_is_not_declared() -> None:
    plan = image_plan(steps(), spec("FP32", -1, 3, 224, 192))
    assert (plan.channels, plan.channels_first, plan.resize, plan.crop, plan.size) == (
        3,
        True,
        (224, 192),
        None,
        (224, 192),
    )
    assert plan.scale == 1 / 255
    last = image_plan(steps(), spec("UINT8", -1, 32, 40, 1))
    assert (last.channels, last.channels_first, last.resize, last.scale) == (1, False, (32, 40), 1.0)
    any_size = image_plan(steps(resize=256), spec("FP16", -1, -1, -1, -1))
    assert (any_size.channels, any_size.channels_first, any_size.resize, any_size.size) == (3, True, 256, None)
    cut = image_plan(steps(resize=256, crop=224, mean=[0.5], std=[0.1, 0.2, 0.3]), spec("FP32", -1, 3, 224, 224))
    assert (cut.resize, cut.crop, cut.size) == (256, (224, 224), (224, 224))
    assert (cut.mean, cut.std) == ((0.5, 0.5, 0.5), (0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    ("given", "of", "error"),
    [
        (steps(), spec("INT64", -1, 3, 8, 8), r"config\.prepare\.pixels\.image: the input is INT64"),
        (steps(), spec("FP32", -1, 64), r"config\.prepare\.pixels\.image: the input has the shape \[-1, 64\]"),
        (steps(), spec("FP32", 4, 3, 8, 8), r"the shape \[4, 3, 8, 8\]"),
        (steps(), spec("FP32", -1, 5, 8, 8), r"image\.channels: the input has 5 channels"),
        (steps(channels=1), spec("FP32", -1, 3, 8, 8), r"image\.channels: the input has 3 channels"),
        (steps(layout="channels_last"), spec("FP32", -1, 3, 8, 8), r"image\.layout"),
        (steps(mean=[0.5, 0.5]), spec("FP32", -1, 3, 8, 8), r"image\.mean: the input has 3 channels, and 2 numbers"),
        (steps(std=[0.5, 0.5]), spec("FP32", -1, 1, 8, 8), r"image\.std"),
        (steps(scale=0.5), spec("UINT8", -1, 3, 8, 8), r"image: the input is UINT8"),
        (steps(crop=9), spec("FP32", -1, 3, 8, 8), r"image\.crop: the input has images of 8 x 8 pixels, and 9 x 9"),
        (steps(resize={"height": 8, "width": 9}), spec("FP32", -1, 3, 8, 8), r"image\.resize"),
        (steps(resize=9), spec("FP32", -1, 3, 8, 8), r"image: the input has images of 8 x 8 pixels: give crop"),
        (steps(crop=8192), spec("FP32", -1, 3, -1, -1), r"image\.crop: the input would have 67108864 pixels"),
    ],
)
def test_steps_that_do_not_fit_are_refused_by_name(given: ImageSteps, of: TensorSpec, error: str) -> None:
    signature = Signature(inputs=(of,), outputs=(), batching=True)
    with pytest.raises(Failure, match=error):
        check_preparation({"pixels": Preparation(image=given)}, signature)


def test_an_unknown_input_is_refused_by_name() -> None:
    signature = Signature(inputs=(spec("FP32", -1, 3, 8, 8),), outputs=(), batching=True)
    with pytest.raises(Failure, match=r"config\.prepare: the model has no input 'pixel': it has pixels"):
        check_preparation({"pixel": Preparation(image=steps())}, signature)


@pytest.mark.parametrize("fields", [{"size": 3}, {"resize": 0}, {"std": [0.0]}, {"resample": "sinc"}, {"scale": -1}])
def test_documents_that_are_no_steps(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        steps(**fields)
