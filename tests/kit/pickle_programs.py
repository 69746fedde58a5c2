"""Pickles written opcode by opcode, for what no pickler writes."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence

called: list[object] = []


def trap(*arguments: object, **_: object) -> object:
    """Stands for any function that a pickle may not call."""
    called.append(arguments)
    return arguments


def text(value: str) -> bytes:
    content = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(content)) + content


def number(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def named(path: str) -> bytes:
    """The global at the path `module.name`."""
    module, _, name = path.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def stacked(module: str, name: str) -> bytes:
    """The same by STACK_GLOBAL, whose names may have dots."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def row(*items: bytes) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def items(*pieces: bytes) -> bytes:
    return pickle.MARK + b"".join(pieces) + pickle.LIST


def table(*pairs: tuple[bytes, bytes]) -> bytes:
    return pickle.MARK + b"".join(key + value for key, value in pairs) + pickle.DICT


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + row(*arguments) + pickle.REDUCE


def instance(kind: bytes, *arguments: bytes) -> bytes:
    return kind + row(*arguments) + pickle.NEWOBJ


def built(made: bytes, state: bytes) -> bytes:
    return made + state + pickle.BUILD


def extended(made: bytes, *pieces: bytes) -> bytes:
    return made + pickle.MARK + b"".join(pieces) + pickle.APPENDS


def appended(made: bytes, piece: bytes) -> bytes:
    return made + piece + pickle.APPEND


def added(made: bytes, *pieces: bytes) -> bytes:
    return made + pickle.MARK + b"".join(pieces) + pickle.ADDITEMS


def with_item(made: bytes, key: bytes, value: bytes) -> bytes:
    return made + key + value + pickle.SETITEM


def old_instance(path: str, *arguments: bytes) -> bytes:
    module, _, name = path.rpartition(".")
    return pickle.MARK + b"".join(arguments) + pickle.INST + f"{module}\n{name}\n".encode()


def old_object(kind: bytes, *arguments: bytes) -> bytes:
    return pickle.MARK + kind + b"".join(arguments) + pickle.OBJ


def pickled(program: bytes, before: Sequence[bytes] = ()) -> bytes:
    """The whole pickle: `program` is its object, `before` runs first and is dropped."""
    return pickle.PROTO + b"\x04" + b"".join(one + pickle.POP for one in before) + program + pickle.STOP
