"""Turns what a caller passes to `predict` into the inputs of a request. Reads files of images, else pure.

DataFrame, records, dict of columns ─> columns by name ─┐
texts, images, lists, arrays ───────────────────────────┴─> Given: an array for each input of the request
Tables of pandas, polars and pyarrow are known by their methods: none of these libraries is imported.
Pillow is imported only to decode a file. What a version does not say of its images is not guessed: one of another size
is refused, and pixels that would have to be scaled.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from os import PathLike, fspath
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from millstream.client.documents import ImageInput, Metadata, TensorMetadata, Usage
from millstream.client.tensors import Array, encode, fit, is_missing, numbers
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, FLOATS
from millstream.services.nearest_names import unknown_key

_NAMES_CHARACTERS = 400  # of names in a message


class Table(Protocol):
    """A DataFrame of pandas or polars, or a pyarrow Table."""

    @property
    def columns(self) -> Any: ...
    def __getitem__(self, name: Any, /) -> Any: ...
    def __len__(self) -> int: ...


TableT = TypeVar("TableT", bound=Table)
#: what `predict` takes besides tables and records; Any: an image of Pillow
Inputs = Mapping[str, Any] | ArrayLike | PathLike[str] | Sequence[PathLike[str]] | Any


class Given(NamedTuple):
    """An input of a request, and its values in a shape that fits."""

    spec: TensorMetadata
    array: Array


def given_inputs(metadata: Metadata, inputs: Any) -> list[Given]:
    """Return the inputs of a request for a model.

    Missing inputs and names of columns are not checked here: only the server knows which ones are optional.

    Raises:
        Failure: INVALID: they do not fit the model; the message says what does.
    """
    if is_table(inputs):
        return _of_table(metadata, columns_of(inputs))
    if is_records(inputs):
        return _of_table(metadata, _columns_of_records(inputs))
    if isinstance(inputs, Mapping):
        return _of_names(metadata, inputs)
    if isinstance(inputs, np.ndarray) and inputs.dtype.names:  # a structured array
        return _of_table(metadata, {name: inputs[name] for name in inputs.dtype.names})
    text = _text_spec(metadata)
    if text is not None and _are_texts(inputs) and all(spec["datatype"] != BYTES for spec in metadata["inputs"]):
        return [_given(metadata, text, inputs)]
    encoded = _encoded(metadata)
    if len(encoded) == 1 and _are_files(inputs):
        return [_files(next(iter(encoded.values())), inputs)]
    specs = metadata["inputs"]
    of_text = [spec for spec in specs if spec["datatype"] == BYTES]
    if len(specs) > 1 and len(of_text) == 1 and _are_texts(inputs):  # the others may be optional: the server knows
        specs = of_text
    if len(specs) != 1:
        names = ", ".join(spec["name"] for spec in specs)[:_NAMES_CHARACTERS]
        hint = "" if text is None else ", or send texts"
        raise invalid(f"{metadata['name']} has {len(specs)} inputs: give each by its name ({names}){hint}")
    return [_given(metadata, specs[0], inputs)]


def is_table(value: Any) -> bool:
    """Whether a value is a DataFrame or a pyarrow Table."""
    kind = type(value)
    return hasattr(kind, "columns") and hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


def is_records(value: Any) -> bool:
    """Whether a value is a list of dicts."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)


def columns_of(table: Table) -> dict[str, Array]:
    """Return the columns of a DataFrame or a pyarrow Table by name. Raises Failure(INVALID)."""
    names = list(getattr(table, "column_names", table.columns))
    if names == list(range(len(names))):  # as pandas names the columns of an array
        return {str(name): _array(table[name], str(name)) for name in names}
    for name, count in Counter(names).items():
        if not isinstance(name, str):
            raise invalid(f"the table has a column {name!r}, whose name is no text: name it, or pass table.to_numpy()")
        if count > 1:
            raise invalid(f"the table has {count} columns '{name}'")
    return {name: _array(_plain(table[name]), name) for name in names}


def _plain(column: Any) -> Any:
    """Return a column without a dictionary: numpy reads the codes of missing values of pyarrow's as values."""
    return column.to_pylist() if str(getattr(column, "type", "")).startswith("dictionary") else column


def _columns_of_records(records: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    first = records[0]
    for at, record in enumerate(records):
        for name in record.keys() ^ first.keys():
            what = f"no '{name}', which record 0 has" if name in first else f"'{name}', which record 0 has not"
            raise invalid(f"record {at} has {what}: all need the same columns, with None where a value is missing")
    return {str(name): [record[name] for record in records] for name in first}


def _of_names(metadata: Metadata, named: Mapping[Any, Any]) -> list[Given]:
    """Return inputs by name: those of the model, its text, or the columns of its table."""
    specs = {spec["name"]: spec for spec in metadata["inputs"]}
    text = _text_spec(metadata)
    if text is not None and text["name"] in named:
        specs = {text["name"]: text} | specs
    specs |= {name: file_spec(name) for name in _encoded(metadata).values() if name not in specs}
    columns = _column_names(metadata)
    if columns and not named.keys() <= specs.keys() and len(metadata["inputs"]) == 1:
        return [_column(metadata["inputs"][0], str(name), values) for name, values in named.items()]
    unknown = [name for name in named if name not in specs and name not in columns]
    if not unknown:  # the model does not use the other columns
        return [_given(metadata, spec, named[name]) for name, spec in specs.items() if name in named]
    if text is not None:
        specs = {text["name"]: text} | specs
    said = unknown_key(str(unknown[0]), [*specs, *(name for name in columns if name not in specs)], "input")
    raise invalid(f"{metadata['name']}: {said}")


def _of_table(metadata: Metadata, columns: Mapping[str, Any]) -> list[Given]:
    """Return the columns of a table as inputs by name; by position if the model's one input, or the table, has none."""
    if not columns:
        raise invalid("the table has no columns")
    specs = metadata["inputs"]
    only = specs[0] if len(specs) == 1 and len(specs[0]["shape"]) in {1, 2} else None
    names = _column_names(metadata)
    unnamed = list(columns) == [str(at) for at in range(len(columns))] and columns.keys() != set(names)
    named = names or _text_spec(metadata) is not None or (only is not None and only["name"] in columns)
    if only is None or (named and not unnamed):
        return _of_names(metadata, columns)
    width = (*only["shape"], 1)[1]
    if width not in {-1, len(columns)}:
        raise invalid(
            f"the table has {len(columns)} columns, and input '{only['name']}' of {metadata['name']} takes {width}"
        )
    arrays = []
    for name, values in columns.items():
        with about_input(name):
            array = _array(values, name)
            arrays.append(fit(numbers(array, only["datatype"]) if only["datatype"] != BYTES else array, [-1, 1], name))
    if len({len(array) for array in arrays}) > 1:
        raise invalid("the columns of the table have different lengths")
    joined = np.concatenate(arrays, axis=1)
    return [Given(only, joined if len(only["shape"]) == 2 else joined[:, 0])]


def _column(table: TensorMetadata, name: str, values: Any) -> Given:
    """Return a column as an input of its own, (rows, 1), with all of its digits: the server looks up categories.

    Text is a category of a model that takes numbers; a missing one is an empty text then, as in CSV.
    """
    array = _array(values, name)
    datatype = table["datatype"]
    if array.dtype.kind in "US" or any(isinstance(element, str | bytes) for element in array.ravel().tolist()):
        if datatype != BYTES:
            array = np.array(["" if is_missing(one) else one for one in array.ravel().tolist()], object)
        datatype = BYTES
    elif datatype != BYTES:
        with about_input(name):
            array = numbers(array, datatype)
            encode(array, datatype)  # refuses what the model cannot take
        if datatype in FLOATS:
            datatype = {"b": "BOOL", "i": "INT64", "u": "UINT64"}.get(array.dtype.kind, "FP64")
    spec: TensorMetadata = {"name": name, "datatype": datatype, "shape": [-1, 1]}
    return Given(spec, fit(array, spec["shape"], name))


def _given(metadata: Metadata, spec: TensorMetadata, value: Any) -> Given:
    """Return what a caller passes for one input of the model."""
    name, numeric = spec["name"], spec["datatype"] != BYTES
    several = isinstance(value, list | tuple) and bool(value)
    first = value[0] if several else value
    encoded = _encoded(metadata)
    if name in {*encoded, *encoded.values()} and _are_files(value):
        return _files(name, value)
    if not numeric and _is_picture(first):  # as a function of images takes it
        return _files(name, value)
    if numeric and (is_image(first) or isinstance(first, str)):
        usage = _usage(metadata)
        if usage is not None and usage["image"] is not None and usage["input"] == name:
            return Given(spec, pixels(spec, usage["image"], list(value) if several else [value]))
        what = "text" if isinstance(first, str) else "an image or the bytes of a file"
        raise invalid(f"input '{name}' takes {spec['datatype']} {spec['shape']}, not {what}: pass numbers")
    array = _array(value, name, as_objects=not numeric and not hasattr(value, "dtype"))
    return Given(spec, fit(array, spec["shape"], name))


def _array(value: Any, name: str, *, as_objects: bool = False) -> Array:
    """Return a value as an array; `as_objects`: of Python's objects.

    Texts in a list stay objects: numpy would cut zero bytes off them, and make texts of the numbers beside them.
    """
    as_objects |= isinstance(value, list | tuple) and any(isinstance(one, str | bytes) for one in value)
    try:
        array = np.asarray(value, dtype=object if as_objects else None)
    except Exception as error:  # whatever `__array__` of a foreign type raises
        why = "its arrays differ in shape" if "inhomogeneous" in str(error) else error
        raise invalid(f"input '{name}' is no array: {_uneven(value) or why}") from error
    if array.dtype == object and any(isinstance(one, list | tuple | np.ndarray) for one in array.ravel()):
        if not isinstance(value, list | tuple):
            return _array(array.tolist(), name)  # a column of lists
        raise invalid(f"input '{name}' is no array: {_uneven(value) or 'it has lists beside values'}")
    if array.dtype == object and array.ndim == 0 and not (isinstance(value, str | bytes | Number) or is_missing(value)):
        raise invalid(f"input '{name}' is no array: it is a value of type {type(value).__name__}")
    return array


def _uneven(value: Any, where: str = "") -> str:
    """Return which lists of one level differ in length; "" if none do."""
    if not isinstance(value, list | tuple) or len(where) > _NAMES_CHARACTERS:
        return ""
    sizes = [len(one) if isinstance(one, list | tuple | np.ndarray) else -1 for one in value]
    other = next((at for at, size in enumerate(sizes) if size != sizes[0]), None)
    if other is not None:
        said = [
            f"{where}[{at}] is " + ("one value" if sizes[at] < 0 else f"a list of {sizes[at]}") for at in (0, other)
        ]
        return f"its lists differ in length, {' and '.join(said)}"
    return next((why for at, one in enumerate(value) if (why := _uneven(one, f"{where}[{at}]"))), "")


def takes_texts(metadata: Metadata) -> bool:
    """Whether a text alone is an input: of a model with a tokenizer, or with one input of text."""
    return _text_spec(metadata) is not None or [spec["datatype"] for spec in metadata["inputs"]] == [BYTES]


def _are_texts(value: Any) -> bool:
    """Whether a value is a text, or a list or array of texts."""
    if isinstance(value, str):
        return True
    array = np.asarray(value) if hasattr(value, "dtype") else None
    if array is not None:
        return array.dtype.kind == "U" or (array.dtype == object and array.size > 0 and isinstance(array.flat[0], str))
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)


def _usage(metadata: Metadata) -> Usage | None:
    """Return how the version wants to be called; None if it takes tensors and nothing else."""
    return metadata.get("parameters", {}).get("usage")


def _encoded(metadata: Metadata) -> Mapping[str, str]:
    """Return the inputs that are sent as encoded files, if the caller has such, and the names that these have."""
    usage = _usage(metadata)
    return usage.get("encoded", {}) if usage is not None else {}


def file_spec(name: str) -> TensorMetadata:
    """Return an input that takes encoded files."""
    return {"name": name, "datatype": BYTES, "shape": [-1]}


def _column_names(metadata: Metadata) -> Sequence[str]:
    """Return the names of the columns of a version that takes a table; none if they have none."""
    usage = _usage(metadata)
    return usage["columns"] if usage is not None else ()


def _text_spec(metadata: Metadata) -> TensorMetadata | None:
    """Return the input that takes texts in place of token ids; None if the version has no tokenizer."""
    name = metadata.get("parameters", {}).get("text_input")
    return None if name is None else {"name": name, "datatype": BYTES, "shape": [-1]}


@contextlib.contextmanager
def about_input(name: str) -> Iterator[None]:
    """Name the input in failures of the block."""
    try:
        yield
    except Failure as failure:
        raise invalid(f"input '{name}': {failure.message}") from failure


_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
#: modes of Pillow with 8 bits for each value: others would be cut off at 255
_MODES_OF_BYTES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"})


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, or the bytes or the path of a file that may be one."""
    return isinstance(value, bytes | bytearray | PathLike) or _is_picture(value)


def _is_picture(value: Any) -> bool:
    """Whether a value is an image of Pillow."""
    module = sys.modules.get("PIL.Image")  # a caller with such an image has imported it
    return module is not None and isinstance(value, module.Image)


def _are_files(value: Any) -> bool:
    """Whether a value is a file of an image, or several: paths, also as text, bytes, or images of Pillow."""
    first = value[0] if isinstance(value, list | tuple) and value else value
    return is_image(first) or isinstance(first, str)


def _files(name: str, value: Any) -> Given:
    """Return encoded files as an input. Raises Failure(INVALID)."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    files = np.empty(len(values), object)
    files[:] = [_file(one) for one in values]
    return Given(file_spec(name), files)


def _file(value: Any) -> bytes:
    """Return the bytes of a file, or those of a PNG for an image of Pillow. Raises Failure(INVALID)."""
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | PathLike):
        try:
            with open(value, "rb") as opened:
                return opened.read()
        except (OSError, ValueError) as error:
            raise _unreadable(value, error) from error
    written = io.BytesIO()
    try:
        value.save(written, "PNG")
    except Exception as error:  # of a mode that PNG has not, or of something else than an image
        raise invalid(f"a value of type {type(value).__name__} cannot be sent as an image: {error}") from error
    return written.getvalue()


def _unreadable(path: Any, error: OSError | ValueError) -> Failure:
    return invalid(f"the file {str(fspath(path))[:200]} cannot be read: {getattr(error, 'strerror', None) or error}")


def pixels(spec: TensorMetadata, image: ImageInput, values: list[Any]) -> Array:
    """Return images as an input takes them: (images, channels, height, width), or the channels last.

    Args:
        spec: of the input.
        image: how the input holds an image, as the version's metadata says.
        values: images of Pillow, paths, or the bytes of files.

    Raises:
        Failure: INVALID: one is no image or of another size, or nothing says how pixels become values.
    """
    shape = f"{spec['datatype']} {spec['shape']}"
    first = image["layout"] == "channels_first"
    if spec["datatype"] != "UINT8":
        raise invalid(
            f"input '{spec['name']}' takes {shape}, and the model does not say how pixels become its values (mean, "
            f"deviation): send np.asarray(image){'.transpose(2, 0, 1)' if first else ''}, scaled as in its training"
        )
    arrays = [_pixels(_opened(value), image, shape) for value in values]
    if any(array.shape != arrays[0].shape for array in arrays):
        raise invalid("the images have different sizes: resize them to one, or send them one by one")
    return np.stack(arrays)


def _pixels(picture: Any, image: ImageInput, shape: str) -> Array:
    width, height = picture.size
    if image["height"] not in {-1, height} or image["width"] not in {-1, width}:
        raise invalid(
            f"the image has {width} x {height} pixels, and the model takes {shape}: crop or resize it as in its "
            f"training, such as image.resize(({max(image['width'], 1)}, {max(image['height'], 1)}))"
        )
    if picture.mode not in _MODES_OF_BYTES:
        raise invalid(f"the image has values of mode {picture.mode}, not of 8 bits: send an array as in its training")
    mode = _MODES[image["channels"]]
    if mode != "RGBA" and picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        raise invalid(f"the image is transparent in places, and the model takes {shape}: put it on a background")
    array: Array = np.asarray(picture.convert(mode), np.uint8).reshape(height, width, image["channels"])
    return array.transpose(2, 0, 1) if image["layout"] == "channels_first" else array


def _opened(value: Any) -> Any:
    """Return the decoded image of Pillow."""
    if isinstance(value, bytes | bytearray):
        what, file = "the bytes", io.BytesIO(value)
    elif isinstance(value, str | PathLike):
        what = f"the file {str(fspath(value))[:200]}"
        try:
            with open(value, "rb") as opened:
                file = io.BytesIO(opened.read())
        except (OSError, ValueError) as error:
            raise _unreadable(value, error) from error
    else:
        return value
    try:
        from PIL import Image
    except ImportError as error:
        raise invalid("an image is decoded by Pillow, which is missing here: pip install pillow") from error
    try:
        picture = Image.open(file)
        picture.load()
    except Exception as error:  # of its decoders, which raise many kinds
        kind = type(error).__name__
        why = "its format is unknown" if kind == "UnidentifiedImageError" else str(error) or kind
        raise invalid(f"{what} cannot be decoded as an image: {why}") from error
    return picture
