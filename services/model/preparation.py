"""What is done with images and audio before a version runs: steps that its configuration declares. Pure.

config.prepare: {"pixel_values": {"image": {"resize": 256, "crop": 224, "mean": […], "std": […]}}}
                {"input_values": {"audio": {"rate": 16000}}}
check_preparation ─> each step fits the input that it makes, by name, datatype and shape
A request gives encoded files (BYTES, one each row) in place of such an input; the tensor itself is taken as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import FLOATS
from millstream.services.model.signature import Signature, TensorSpec

#: pixels of a side, and of all of an image after it was resized; each pixel takes up to 16 bytes as a tensor
SIDE_MAX = 8192
PREPARED_PIXELS_MAX = 1 << 24
Side = Annotated[int, Field(ge=1, le=SIDE_MAX)]
Numbers = Annotated[tuple[float, ...], Field(min_length=1, max_length=4)]
_COLOURS = {1, 3, 4}


class Size(BaseModel):
    """Height and width in pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    height: Side
    width: Side


class ImageSteps(BaseModel):
    """How an encoded image becomes an input, in this order: decode, turn as EXIF says, resize, crop, scale, normalise.

    The image is converted to the input's channels: grey, RGB or RGBA.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    resize: Side | Size | None = Field(
        None,
        description="Length of the shorter side, or height and width; default: the input's own size, if it is fixed.",
    )
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"] = "bilinear"
    crop: Side | Size | None = Field(
        None, description="Size of the part around the centre that is kept; what lies outside of the image is 0."
    )
    scale: float | None = Field(
        None, gt=0, description="Factor of each value, 0 to 255; default: 1/255 for floating-point inputs, 1 for UINT8."
    )
    mean: Numbers | None = Field(
        None, description="Subtracted from each channel after that; one number for all, or each."
    )
    std: Numbers | None = Field(None, description="Divides each channel after that.")
    layout: Literal["channels_first", "channels_last"] | None = Field(
        None, description="Order of the input's dimensions; default: by its shape, channels_first where that is open."
    )
    channels: Literal[1, 3, 4] | None = Field(None, description="Default: by the input's shape, 3 where that is open.")
    background: tuple[int, int, int] | None = Field(
        None, description="RGB behind transparent pixels; without it an image that has some is refused."
    )

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.std is not None and not all(value > 0 for value in self.std):
            raise ValueError("std has to be above 0")
        return self


class AudioSteps(BaseModel):
    """How an encoded recording becomes an input: decode, mix to mono, resample, normalise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rate: int = Field(ge=1000, le=192_000, description="Samples for each second that the model wants.")
    seconds_max: float = Field(30, gt=0, le=3600, description="A longer recording is refused.")
    normalize: bool = Field(False, description="Whether each recording gets the mean 0 and the variance 1.")


class Preparation(BaseModel):
    """What is done with one input: `image` or `audio`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: ImageSteps | None = None
    audio: AudioSteps | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.image is None) == (self.audio is None):
            raise ValueError("give the steps of one: image or audio")
        return self


class ImagePlan(NamedTuple):
    """The steps of an input, with what its shape decides.

    Args:
        resize: length of the shorter side, or (height, width); None: the image keeps its size.
        crop: (height, width); None: nothing is cut off.
        size: (height, width) of what is made; None: it depends on the image.
        mean: of each channel.
        std: of each channel.
    """

    datatype: str
    channels: int
    channels_first: bool
    resize: int | tuple[int, int] | None
    resample: str
    crop: tuple[int, int] | None
    size: tuple[int, int] | None
    scale: float
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    background: tuple[int, int, int] | None


class AudioPlan(NamedTuple):
    """The steps of an input, with what its shape decides.

    Args:
        rank: dimensions of the input: [recordings, samples], or with one channel between them.
        samples: that the input wants; a shorter recording gets zeros behind it. None: any number.
    """

    datatype: str
    rank: int
    samples: int | None
    rate: int
    seconds_max: float
    normalize: bool


def plan_of(steps: Preparation, spec: TensorSpec) -> ImagePlan | AudioPlan:
    """Return what makes an input. Raises Failure(INVALID), which names the field, if the steps do not fit it."""
    if steps.image is not None:
        return image_plan(steps.image, spec)
    assert steps.audio is not None
    return audio_plan(steps.audio, spec)


def check_preparation(prepare: Mapping[str, Preparation], signature: Signature) -> None:
    """Raise Failure(INVALID), which names the field, if steps do not fit the inputs of the model."""
    inputs = {spec.name: spec for spec in signature.inputs}
    for name, steps in prepare.items():
        if name not in inputs:
            raise invalid(f"config.prepare: the model has no input {name[:80]!r}: it has {', '.join(inputs)[:200]}")
        plan_of(steps, inputs[name])


def audio_plan(steps: AudioSteps, spec: TensorSpec) -> AudioPlan:
    """Return what makes the input of a recording. Raises Failure(INVALID), which names the field."""
    if spec.datatype not in FLOATS:
        raise _wrong(spec, "audio", f"is {spec.datatype}: a recording is FP16, FP32 or FP64")
    rank = len(spec.shape)
    if rank not in {2, 3} or spec.shape[0] not in {-1, 1} or (rank == 3 and spec.shape[1] not in {-1, 1}):
        raise _wrong(spec, "audio", f"has the shape {list(spec.shape)}, not [recordings, samples]")
    samples = None if spec.shape[-1] == -1 else spec.shape[-1]
    return AudioPlan(spec.datatype, rank, samples, steps.rate, steps.seconds_max, steps.normalize)


def image_plan(steps: ImageSteps, spec: TensorSpec) -> ImagePlan:
    """Return what makes the input of an image. Raises Failure(INVALID), which names the field, if it does not fit."""
    if spec.datatype != "UINT8" and spec.datatype not in FLOATS:
        raise _wrong(spec, "image", f"is {spec.datatype}: an image is FP16, FP32, FP64 or UINT8")
    if len(spec.shape) != 4 or spec.shape[0] not in {-1, 1}:
        raise _wrong(spec, "image", f"has the shape {list(spec.shape)}, not [images, channels, height, width]")
    first = _channels_first(steps, spec)
    channels, own = (spec.shape[1], spec.shape[2:]) if first else (spec.shape[3], spec.shape[1:3])
    if channels == -1:
        channels = steps.channels or 3
    if channels not in _COLOURS or steps.channels not in {None, channels}:
        raise _wrong(spec, "image.channels", f"has {channels} channels: declare those, 1, 3 or 4")
    numbers = {name: _of_channels(spec, name, getattr(steps, name), channels) for name in ("mean", "std")}
    scale = steps.scale
    if spec.datatype == "UINT8":
        if scale not in {None, 1.0} or any(numbers.values()):
            raise _wrong(spec, "image", "is UINT8: scale, mean and std are for floating-point inputs")
        scale = 1.0
    resize = _resize(steps, own)
    crop = _size(steps.crop) if steps.crop is not None else None
    made = crop or (resize if isinstance(resize, tuple) else None)
    _check_size(spec, own, made, "image.crop" if crop is not None else "image.resize")
    return ImagePlan(
        spec.datatype,
        channels,
        first,
        resize,
        steps.resample,
        crop,
        made,
        1 / 255 if scale is None else scale,
        numbers["mean"],
        numbers["std"],
        steps.background,
    )


def _channels_first(steps: ImageSteps, spec: TensorSpec) -> bool:
    by_shape = spec.shape[1] in _COLOURS or spec.shape[3] not in _COLOURS
    if steps.layout is None:
        return by_shape
    first = steps.layout == "channels_first"
    if spec.shape[1 if first else 3] not in {-1, *_COLOURS}:
        raise _wrong(spec, "image.layout", f"has the shape {list(spec.shape)}, whose channels are not there")
    return first


def _of_channels(
    spec: TensorSpec, name: str, numbers: tuple[float, ...] | None, channels: int
) -> tuple[float, ...] | None:
    if numbers is None:
        return None
    if len(numbers) not in {1, channels}:
        raise _wrong(spec, f"image.{name}", f"has {channels} channels, and {len(numbers)} numbers are given")
    return numbers * channels if len(numbers) == 1 else numbers


def _size(size: int | Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size.height, size.width)


def _resize(steps: ImageSteps, own: tuple[int, ...]) -> int | tuple[int, int] | None:
    if isinstance(steps.resize, int):
        return steps.resize
    if steps.resize is not None:
        return _size(steps.resize)
    return (own[0], own[1]) if steps.crop is None and min(own) > 0 else None


def _check_size(spec: TensorSpec, own: tuple[int, ...], made: tuple[int, int] | None, field: str) -> None:
    """Raise Failure(INVALID) if what is made is not of the input's size, or is too large."""
    if made is None:
        if max(own) != -1:
            raise _wrong(spec, "image", f"has images of {_sides(own)} pixels: give crop, or height and width to resize")
        return
    if any(want not in {-1, got} for want, got in zip(own, made, strict=True)):
        raise _wrong(spec, field, f"has images of {_sides(own)} pixels, and {_sides(made)} are made")
    if made[0] * made[1] > PREPARED_PIXELS_MAX:
        raise _wrong(spec, field, f"would have {made[0] * made[1]} pixels: at most {PREPARED_PIXELS_MAX}")


def _sides(sides: tuple[int, ...]) -> str:
    return " x ".join("any" if side == -1 else str(side) for side in sides)


def _wrong(spec: TensorSpec, field: str, what: str) -> Failure:
    return invalid(f"config.prepare.{spec.name[:80]}.{field}: the input {what}")
