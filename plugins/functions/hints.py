"""What the type hints of a function say of its inputs and outputs, and how values become tensors and back.

hint ─> HintCodec: datatype and dimensions of one row, values of rows <─> data
A parameter `list[T]`, or an array whose first dimension is variable, takes all rows of a run; others take one.
Standard library alone: numpy and Pillow are imported where a hint names them.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import struct
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from millstream.plugins.children.confined import InputError, ModelError
from millstream.plugins.children.message_channel import Buffer, decode_elements, encode_elements

BYTES = "BYTES"
#: of an image, before it is decoded
PIXELS_MAX = 64 << 20
#: numpy's names of the datatypes that arrays may have
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32", "float64": "FP64",
}  # fmt: skip
_SCALARS: dict[Any, tuple[str, str]] = {bool: ("BOOL", "?"), int: ("INT64", "q"), float: ("FP64", "d")}
_EXAMPLE = "Annotated[NDArray[np.float32], ('rows', 4)]"


class HintError(Exception):
    """A hint is none that can be served. The text says what to write."""


class HintCodec(NamedTuple):
    """How values of a hint are tensors.

    Args:
        datatype: of the v2 protocol.
        dims: of one row; -1: variable.
        decode: data and shape, rows first ─> the values of rows.
        encode: the values of rows ─> data and shape.
        kind: "text", "json", "image", "bytes" or "numbers": what an element means to people.
        whole: the value is an array of all rows, with them in its first dimension.
        rows: the name of that dimension, which the hint gives; "": it gives none.
    """

    datatype: str
    dims: tuple[int, ...]
    decode: Callable[[Buffer, tuple[int, ...]], Sequence[Any]]
    encode: Callable[[Sequence[Any]], tuple[Buffer, tuple[int, ...]]]
    kind: str
    whole: bool = False
    rows: str = ""


class Parameter(NamedTuple):
    """A parameter or a result: its codec, and whether it has the values of all rows."""

    name: str
    codec: HintCodec
    of_rows: bool
    optional: bool = False


def inputs_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return what the hints of a function's parameters say. Raises HintError."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    if not parameters:
        raise HintError("it takes no parameter")
    inputs = []
    for name, parameter in parameters.items():
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise HintError(f"parameter {name!r} cannot be given by its name")
        if name not in hints:
            raise HintError(f"parameter {name!r} has no type hint")
        inputs.append(value_of(name, hints[name], optional=parameter.default is not parameter.empty))
    return inputs


def value_of(name: str, hint: Any, *, optional: bool = False, of_row: bool = False) -> Parameter:
    """Return what a hint says. `of_row`: it is of one row, also where it is a list or has a first size that varies.

    Raises HintError.
    """
    if optional:
        hint = _without_none(hint)
    if of_row:
        return Parameter(name, _codec(name, hint, of_row=True), False, optional)
    if get_origin(hint) in {list, Sequence}:
        (element,) = get_args(hint) or (Any,)
        return Parameter(name, _codec(name, element), True, optional)
    codec = _codec(name, hint)
    return Parameter(name, codec, codec.whole, optional)


def part_of(hint: Any) -> Any:
    """Return the hint of one part, of the hint of a generator. Raises HintError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is not None and issubclass(origin, (abc.Iterable, abc.AsyncIterable)) and arguments:
        return arguments[0]
    raise HintError("a generator's type hint says what it yields: -> Iterator[str], -> AsyncIterator[str]")


def results_of(hint: Any, *, of_row: bool) -> tuple[list[Parameter], bool]:
    """Return what the hint of a result says, and whether results are tuples of these. Raises HintError.

    `of_row`: each result is of one row.
    """
    if hint is None or hint is type(None):
        raise HintError("it has no type hint of what it returns (-> …)")
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return [value_of(f"output_{i}", one, of_row=of_row) for i, one in enumerate(get_args(hint))], True
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        fields = typing.get_type_hints(hint, include_extras=True).items()
        return [value_of(name, one, of_row=of_row) for name, one in fields], True
    return [value_of("output", hint, of_row=of_row)], False


def takes_rows(hint: Any) -> bool:
    """Return whether a hint is of the values of all rows: a list, or an array whose declared first size varies."""
    hint, extras = _unannotated(hint)
    if get_origin(hint) in {list, Sequence}:
        return True
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or (get_origin(hint) or hint) is not numpy.ndarray:
        return False
    return _declared(hint, extras, numpy)[1][:1] == (-1,)


def _without_none(hint: Any) -> Any:
    """Return T of `T | None`: what may be left out is not sent as null."""
    if get_origin(hint) in {Union, types.UnionType}:
        left = [one for one in get_args(hint) if one is not type(None)]
        if len(left) == 1:
            return left[0]
    return hint


def _codec(name: str, hint: Any, *, of_row: bool = False) -> HintCodec:
    hint, extras = _unannotated(hint)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and (get_origin(hint) or hint) is numpy.ndarray:
        return _array(name, hint, extras, numpy, of_row=of_row)
    if hint is str:
        return HintCodec(BYTES, (), _texts, _encode_texts, "text")
    if hint in {bytes, bytearray}:
        return HintCodec(BYTES, (), lambda data, _: decode_elements(data), _encode_bytes, "bytes")
    if hint in _SCALARS:
        datatype, form = _SCALARS[hint]
        return _numbers(datatype, form, hint)
    if get_origin(hint) is list:
        nested = _nested(hint)
        if nested is not None:
            return nested
    image: Any = sys.modules.get("PIL.Image")
    if image is not None and hint is image.Image:
        return HintCodec(
            BYTES, (), lambda data, _: [_image(image, one) for one in decode_elements(data)], _pngs, "image"
        )
    return _json(name, hint)


def _unannotated(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        return inner, tuple(extras)
    return hint, ()


def _array(name: str, hint: Any, extras: Sequence[Any], numpy: Any, *, of_row: bool) -> HintCodec:
    """Return the codec of an array: its datatype and shape are in the hint, or beside it (`Annotated`)."""
    dtype, shape = _declared(hint, extras, numpy)
    try:
        form = numpy.dtype(dtype)
    except TypeError:
        form = None
    if dtype is None or form is None or form.name not in DATATYPES or not shape:
        raise HintError(f"{name}: an array needs a datatype and a shape: {_EXAMPLE}")
    whole = shape[0] == -1 and not of_row
    dims, form = shape[1:] if whole else shape, form.newbyteorder("<")

    def decode(data: Buffer, at: tuple[int, ...]) -> Any:
        return numpy.frombuffer(data, form).reshape(at)

    def encode(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
        array = values if isinstance(values, numpy.ndarray) else _stacked(numpy, values)
        found = array.shape[1:]
        if len(found) != len(dims) or any(want not in {-1, got} for want, got in zip(dims, found, strict=True)):
            raise ModelError(f"its result has the shape {list(array.shape)}, and {['rows', *dims]} was declared")
        if array.dtype != form and not numpy.can_cast(array.dtype, form, "same_kind"):
            raise ModelError(f"its result is {array.dtype}, and {form.name} was declared")
        ordered = numpy.ascontiguousarray(array, form)
        return ordered.reshape(-1).view(numpy.uint8).data, array.shape

    named = next((one[0] for one in extras if isinstance(one, tuple | list) and one and isinstance(one[0], str)), "")
    return HintCodec(DATATYPES[form.name], dims, decode, encode, "numbers", whole, named if whole else "")


def _declared(hint: Any, extras: Sequence[Any], numpy: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the datatype and the shape that a hint of an array names; None and (): it names none."""
    dtype: Any = None
    shape: tuple[int, ...] = ()
    for argument in get_args(hint):
        if get_origin(argument) is tuple and Ellipsis not in get_args(argument):
            shape = tuple(map(_size, get_args(argument)))
        elif get_origin(argument) is numpy.dtype:
            (dtype,) = get_args(argument)
    for extra in extras:
        if isinstance(extra, tuple | list):
            shape = tuple(map(_size, extra))
        else:
            dtype = extra
    return dtype, shape


def _stacked(numpy: Any, values: Sequence[Any]) -> Any:
    try:
        return numpy.stack([numpy.asarray(one) for one in values])
    except ValueError as error:
        raise ModelError(f"its results are not arrays of one shape: {error}") from error


def _size(one: Any) -> int:
    """Return a size of a shape: a number; -1, None, a name or `int` for one that varies."""
    if get_origin(one) is Literal:
        (one,) = get_args(one)
    return one if isinstance(one, int) and not isinstance(one, bool) and one >= 0 else -1


def _numbers(datatype: str, form: str, kind: Callable[[Any], Any]) -> HintCodec:
    def decode(data: Buffer, _: tuple[int, ...]) -> Sequence[Any]:
        return _unpacked(form, data)

    def encode(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
        return _packed(form, kind, values), (len(values),)

    return HintCodec(datatype, (), decode, encode, "numbers")


def _unpacked(form: str, data: Buffer) -> list[Any]:
    return list(struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))


def _packed(form: str, kind: Callable[[Any], Any], values: Sequence[Any]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}{form}", *map(kind, values))
    except (TypeError, ValueError, struct.error) as error:
        raise ModelError(f"its result is no {kind.__name__}: {error}") from error


def _nested(hint: Any) -> HintCodec | None:
    """Return the codec of lists of numbers or texts, in lists; None: of something else, which is JSON."""
    depth = 0
    while get_origin(hint) is list and get_args(hint):
        (hint,), depth = get_args(hint), depth + 1
    if hint not in _SCALARS and hint is not str:
        return None
    datatype, form = _SCALARS.get(hint, (BYTES, ""))

    def decode(data: Buffer, shape: tuple[int, ...]) -> Sequence[Any]:
        values = _texts(data, shape) if not form else _unpacked(form, data)
        for size in reversed(shape[1:]):
            values = [list(values[at : at + size]) for at in range(0, len(values), size)] if size else []
        return values

    def encode(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
        shape, flat = [len(values)], list(values)
        for _ in range(depth):
            sizes = {len(one) for one in flat}
            if len(sizes) > 1:
                raise ModelError("its lists differ in length: return JSON, or lists of one length")
            shape.append(sizes.pop() if sizes else 0)
            flat = [value for one in flat for value in one]
        data = _encode_texts(flat)[0] if not form else _packed(form, hint, flat)
        return data, tuple(shape)

    return HintCodec(datatype, (-1,) * depth, decode, encode, "numbers" if form else "text")


def _texts(data: Buffer, _: tuple[int, ...]) -> list[str]:
    try:
        return [one.decode() for one in decode_elements(data)]
    except UnicodeDecodeError as error:
        raise InputError("a text is not UTF-8") from error


def _encode_texts(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
    if not all(isinstance(one, str) for one in values):
        wrong = next(one for one in values if not isinstance(one, str))
        raise ModelError(f"its result is {type(wrong).__name__}, and str was declared")
    return encode_elements(one.encode() for one in values), (len(values),)


def _encode_bytes(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
    try:
        return encode_elements(bytes(memoryview(one)) for one in values), (len(values),)
    except TypeError as error:
        raise ModelError(f"its result is not bytes: {error}") from error


def _image(image: Any, data: bytes) -> Any:
    try:
        opened = image.open(io.BytesIO(data))
        pixels = opened.width * opened.height
        if pixels > PIXELS_MAX:
            raise InputError(f"an image has {pixels} pixels: at most {PIXELS_MAX}")
        opened.load()
    except (InputError, MemoryError):
        raise
    except image.UnidentifiedImageError as error:
        raise InputError("an image cannot be read: it is of no known format") from error
    except Exception as error:
        raise InputError(f"an image cannot be read: {error}") from error
    return opened


def _pngs(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
    found = []
    for one in values:
        file = io.BytesIO()
        one.save(file, "PNG")
        found.append(file.getvalue())
    return encode_elements(found), (len(found),)


def _json(name: str, hint: Any) -> HintCodec:
    """Return the codec of documents: dataclasses, pydantic's models, typed dictionaries and what JSON has itself."""
    read = _reader(name, hint)

    def decode(data: Buffer, _: tuple[int, ...]) -> list[Any]:
        found = []
        for element in decode_elements(data):
            try:
                found.append(read(element))
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"{name}: {' '.join(str(error).split())}") from error
        return found

    def encode(values: Sequence[Any]) -> tuple[Buffer, tuple[int, ...]]:
        try:
            return encode_elements(map(_written, values)), (len(values),)
        except (TypeError, ValueError) as error:
            raise ModelError(f"its result cannot be written as JSON: {error}") from error

    return HintCodec(BYTES, (), decode, encode, "json")


def _reader(name: str, hint: Any) -> Callable[[bytes], Any]:
    if hasattr(hint, "model_validate_json"):
        return hint.model_validate_json  # type: ignore[no-any-return]
    if dataclasses.is_dataclass(hint):
        made: Any = hint
        return lambda element: made(**_object(element))
    if _is_json(hint):
        return json.loads
    raise HintError(
        f"{name}: {getattr(hint, '__name__', hint)} is no type that can be served: use str, bytes, numbers, arrays, "
        "PIL.Image.Image, list, dict, a dataclass, a TypedDict or a model of pydantic"
    )


def _object(element: bytes) -> dict[str, Any]:
    found = json.loads(element)
    if not isinstance(found, dict):
        raise InputError("it is not an object of JSON")
    return found


def _written(value: Any) -> bytes:
    return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """Return what JSON has in place of an object."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


def _is_json(hint: Any) -> bool:
    if hint is Any or hint in {dict, list, str, int, float, bool, None, type(None)} or typing.is_typeddict(hint):
        return True
    origin = get_origin(hint)
    if origin in {dict, list, Union, types.UnionType, typing.Required, typing.NotRequired}:
        return all(map(_is_json, get_args(hint)))
    return origin is Literal
