"""How a version wants to be called: with a text, named columns, an image file, token ids or tensors. Pure.

Manifest ─> usage_of ─> Usage: kind, the input it is about, a sentence for a person, an example request
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from millstream.services.model.datatypes import BINARY_ONLY, BYTES, FLOATS
from millstream.services.model.manifest import Manifest
from millstream.services.model.preparation import ImagePlan, plan_of
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.model.warmup_inputs import make_inputs

#: the input that texts are sent as, in place of token ids
TEXT = "text"
#: the inputs that images and recordings are sent as, in place of the one that is declared
IMAGE, AUDIO = "image", "audio"
TOKENIZER = "tokenizer.json"
IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
EXAMPLE_TEXT = "Millstream serves this text."
#: elements of an example, and columns; a longer one would fill a screen
EXAMPLE_ELEMENTS_MAX, EXAMPLE_COLUMNS_MAX = 1000, 100
#: a grey PNG of one pixel
_EXAMPLE_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
_NAMES_SHOWN = 8
_IMAGE_DATATYPES = frozenset({"FP16", "FP32", "FP64", "UINT8"})
_IMAGE_SIDE_MIN = 8
_COLOURS = {1: "grey", 3: "RGB", 4: "RGBA"}
_COLUMN = frozenset({(-1,), (-1, 1)})  # shapes of an input that is one column of a table
_CELL_DATATYPES = {str: BYTES, bool: "BOOL", int: "INT64", float: "FP64"}
_INTEGERS = frozenset({"INT32", "INT64"})

Kind = Literal["text", "columns", "image", "audio", "tokens", "tensors"]


class ImageInput(BaseModel):
    """How an input holds an image. `height` and `width`: -1 for any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Literal["channels_first", "channels_last"]
    channels: int
    height: int
    width: int


class Usage(BaseModel):
    """How a version wants to be called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = Field(
        description="What a caller has: texts, named columns, images, recordings, token ids, or tensors."
    )
    input: str | None = Field(None, description="The one input that takes it; null: it is spread over all inputs.")
    columns: tuple[str, ...] = Field((), description="Names of the columns, in the order of the model.")
    image: ImageInput | None = Field(None, description="How the input holds an image, where it takes pixels alone.")
    encoded: dict[str, str] = Field(
        {}, description="Inputs of the model that are made here of encoded files -> the names that files are sent as."
    )
    sentence: str = Field(description="The same for a person.")
    example: dict[str, Any] | None = Field(
        None, description="Body of a v2 request that the version answers; null: none is known, or it is too long."
    )


def usage_of(manifest: Manifest) -> Usage:
    """Return how the version wants to be called."""
    signature = manifest.signature
    if takes_texts(manifest):
        return Usage(
            kind="text",
            input=TEXT,
            sentence=f"texts, which are tokenized here (input '{TEXT}'), or token ids",
            example={"inputs": [{"name": TEXT, "datatype": BYTES, "shape": [1], "data": [EXAMPLE_TEXT]}]},
        )
    if manifest.prepare:
        return _usage_of_files(manifest)
    example = _example(manifest)
    inputs = needed_inputs(signature)
    if len(inputs) == 1 and inputs[0].datatype == BYTES and inputs[0].shape in _COLUMN:
        name = inputs[0].name
        return Usage(kind="text", input=name, sentence=f"texts (input '{name}')", example=example)
    if columns := column_names(manifest):
        only = signature.inputs[0].name if len(signature.inputs) == 1 else None
        sentence = f"a table with the columns {_listed(columns)}"
        row = _example_row(manifest, columns)
        return Usage(kind="columns", input=only, columns=columns, sentence=sentence, example=row)
    image = image_input(inputs[0]) if len(inputs) == 1 else None
    if image is not None:
        name = inputs[0].name
        return Usage(kind="image", input=name, image=image, sentence=_image_sentence(inputs[0], image), example=example)
    tensors = _listed([f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in inputs])
    if takes_tokens(signature) and any(spec.name in {IDS, MASK} for spec in inputs):
        return Usage(kind="tokens", sentence=f"token ids, since it has no tokenizer: {tensors}", example=example)
    return Usage(kind="tensors", sentence=f"tensors: {tensors}", example=example)


def encoded_names(manifest: Manifest) -> dict[str, str]:
    """Return the inputs that requests may give as encoded files, and the name of each in such a request.

    The only one of them is called IMAGE or AUDIO, unless the model has an input of this name.
    """
    declared = manifest.prepare
    if len(declared) != 1:
        return {name: name for name in declared}
    ((name, steps),) = declared.items()
    given = IMAGE if steps.image is not None else AUDIO
    return {name: name if any(spec.name == given for spec in manifest.signature.inputs) else given}


def _usage_of_files(manifest: Manifest) -> Usage:
    names = encoded_names(manifest)
    needed = needed_inputs(manifest.signature)
    example = None
    specs = {spec.name: spec for spec in manifest.signature.inputs}
    images = [plan_of(steps, specs[name]) for name, steps in manifest.prepare.items()]
    fixed = all(isinstance(plan, ImagePlan) and plan.size is not None for plan in images)
    if fixed and {spec.name for spec in needed} <= names.keys():
        tensors = [{"name": name, "datatype": BYTES, "shape": [1], "data": [_EXAMPLE_IMAGE]} for name in names.values()]
        example = {"inputs": tensors}
    tensors_too = _listed([f"{name} {specs[name].datatype} {list(specs[name].shape)}" for name in names])
    kind: Kind = "image" if any(steps.image is not None for steps in manifest.prepare.values()) else "audio"
    what = "images" if kind == "image" else "recordings"
    return Usage(
        kind=kind,
        input=next(iter(names.values())) if len(needed) == len(names) == 1 else None,
        encoded=names,
        sentence=f"encoded {what}, which are prepared here (input '{_listed(list(names.values()))}'), or tensors: "
        f"{tensors_too}",
        example=example,
    )


def takes_texts(manifest: Manifest) -> bool:
    """Return whether the version has a tokenizer and takes token ids, and no input of its own is called TEXT."""
    has_tokenizer = any(PurePosixPath(file.path).name == TOKENIZER for file in manifest.files)
    signature = manifest.signature
    return has_tokenizer and takes_tokens(signature) and all(spec.name != TEXT for spec in signature.inputs)


def takes_tokens(signature: Signature) -> bool:
    """Return whether the inputs are token ids by any name, and perhaps MASK and TYPES."""
    inputs = signature.inputs
    ids = [spec for spec in inputs if spec.name not in {MASK, TYPES}]
    return len(ids) == 1 and all(spec.datatype in _INTEGERS and len(spec.shape) == 2 for spec in inputs)


def image_input(spec: TensorSpec) -> ImageInput | None:
    """Return how an input of the shape [images, …] holds an image; None: it is none, to judge by its shape."""
    if spec.datatype not in _IMAGE_DATATYPES or len(spec.shape) != 4:
        return None
    _, first, middle, last = spec.shape
    if first in _COLOURS and _sides(middle, last):
        return ImageInput(layout="channels_first", channels=first, height=middle, width=last)
    if last in _COLOURS and _sides(first, middle):
        return ImageInput(layout="channels_last", channels=last, height=first, width=middle)
    return None


def _sides(height: int, width: int) -> bool:
    return all(size == -1 or size >= _IMAGE_SIDE_MIN for size in (height, width))


def _image_sentence(spec: TensorSpec, image: ImageInput) -> str:
    size = " of any size" if image.height == image.width == -1 else f" of {_side(image.height)} x {_side(image.width)}"
    order = "first" if image.layout == "channels_first" else "last"
    channels = "" if image.channels == 1 else f", channels {order}"
    return f"images{size}, {_COLOURS[image.channels]}{channels}, as {spec.datatype} (input '{spec.name}')"


def _side(size: int) -> str:
    return "any" if size == -1 else str(size)


def column_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the columns of a table: of the one input, or of inputs that are a column each.

    Columns that a model was fitted with and does not use are among them, and no inputs.
    """
    imported, inputs = manifest.imported, manifest.signature.inputs
    named = () if imported is None else imported.columns
    names = tuple(spec.name for spec in inputs)
    if all(spec.shape in _COLUMN for spec in inputs):
        if set(names) <= set(named):
            return named
        if len(names) > 1 or (imported is not None and not named):
            return names
    return () if table_input(manifest.signature, named) is None else named


def table_input(signature: Signature, columns: Sequence[str]) -> TensorSpec | None:
    """Return the one input that has all of the columns; None if each is an input of its own."""
    first = signature.inputs[0] if len(signature.inputs) == 1 else None
    if first is None or len(first.shape) != 2 or list(columns) in ([], [first.name]):
        return None
    return first if first.shape[1] in {-1, len(columns)} else None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name[:80] for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _example(manifest: Manifest) -> dict[str, Any] | None:
    """Return a request of one row with which the model check ran the model; None where JSON has no short form of it."""
    trial, signature = manifest.trial, manifest.signature
    binary = any(spec.datatype in BINARY_ONLY for spec in (*needed_inputs(signature), *signature.outputs))
    if trial is None or binary:
        return None
    sizes = [[trial.size if dim == -1 else dim for dim in spec.shape] for spec in needed_inputs(signature)]
    if sum(prod(shape[1:] if signature.batching else shape) for shape in sizes) > EXAMPLE_ELEMENTS_MAX:
        return None
    datatypes = {spec.name: spec.datatype for spec in signature.inputs}
    inputs = []
    for name, array in make_inputs(signature, 1, trial.size, trial.fill).items():
        data = [one.decode() if isinstance(one, bytes) else one for one in array.ravel().tolist()]
        inputs.append({"name": name, "datatype": datatypes[name], "shape": list(array.shape), "data": data})
    return {"inputs": inputs}


def _example_row(manifest: Manifest, columns: Sequence[str]) -> dict[str, Any] | None:
    """Return a request with a tensor for each column: a category where it has some; None if a name gives no value."""
    inputs = {spec.name: spec for spec in manifest.signature.inputs}
    only = table_input(manifest.signature, columns)
    categories = {} if manifest.imported is None else manifest.imported.categories
    binary = any(spec.datatype in BINARY_ONLY for spec in (*inputs.values(), *manifest.signature.outputs))
    # Without a trial no equal elements are known to run, for text since they are no categories.
    if binary or len(columns) > EXAMPLE_COLUMNS_MAX or (manifest.trial is None and not categories):
        return None
    fill = 0 if manifest.trial is None else manifest.trial.fill
    tensors = []
    for name in columns:
        spec, known = only or inputs.get(name), categories.get(name)
        if spec is None:  # the model does not use it
            continue
        if known is not None and known.coded and not known.values:
            return None
        datatype, value = spec.datatype, _element(spec.datatype, fill)
        if known is not None and known.values and (known.coded or isinstance(known.values[0], str)):
            value = known.values[0]
            datatype = _CELL_DATATYPES[type(value)]
        shape = [1] if only is not None else [1, *spec.shape[1:]]
        tensors.append({"name": name, "datatype": datatype, "shape": shape, "data": [value]})
    return {"inputs": tensors}


def _element(datatype: str, fill: int) -> Any:
    if datatype == BYTES:
        return str(fill)
    return float(fill) if datatype in FLOATS else bool(fill) if datatype == "BOOL" else fill
