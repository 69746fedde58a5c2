"""Reads inputs that an upload's owner declares, as "name:datatype:shape", for files that do not describe them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.datatypes import NUMPY

RANK_MAX = 32
EXAMPLE = "x:FP32:-1,3,224,224"


class DeclaredInput(NamedTuple):
    """An input. `shape`: -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def read_inputs(texts: Sequence[str]) -> tuple[DeclaredInput, ...]:
    """Return the declared inputs in order. Raises Failure(INVALID) with an example."""
    inputs = tuple(map(_read, texts))
    names = [one.name for one in inputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise invalid(f"the input {twice!r} is declared twice")
    return inputs


def _read(text: str) -> DeclaredInput:
    name, _, rest = text.partition(":")
    datatype, _, sizes = rest.partition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(",")) if sizes else ()
    except ValueError:
        raise _wrong(text, "its shape is not whole numbers") from None
    if not name or not name.isprintable() or len(name) > 512:
        raise _wrong(text, "it has no name")
    if datatype not in NUMPY or datatype == "BF16":
        raise _wrong(text, f"{datatype[:20]!r} is no datatype of a tensor of numbers")
    if not shape or len(shape) > RANK_MAX or any(size < -1 or size == 0 for size in shape):
        raise _wrong(text, "a shape has sizes above 0, or -1 for a variable one")
    return DeclaredInput(name, datatype, shape)


def _wrong(text: str, why: str) -> Exception:
    return invalid(f"the declared input {text[:80]!r} cannot be read: {why}; an example: {EXAMPLE}")
