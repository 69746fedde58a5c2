"""The parsers that read what strangers send: name -> what to feed. Whatever such a function raises is a finding."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.fuzz.connection import Connections
from tests.fuzz.decoding import fuzz_binary, fuzz_json, fuzz_packed
from tests.fuzz.http2 import fuzz_frames, fuzz_hpack
from tests.fuzz.replies import fuzz_replies

CORPUS = Path(__file__).parent / "corpus"


@cache
def _connections() -> Connections:
    connections = Connections()
    atexit.register(connections.close)
    return connections


def fuzz_connection(data: bytes) -> None:
    """All that a client sends on one connection."""
    _connections().fuzz(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "json": fuzz_json,
    "binary": fuzz_binary,
    "packed": fuzz_packed,
    "connection": fuzz_connection,
    "frames": fuzz_frames,
    "hpack": fuzz_hpack,
    "replies": fuzz_replies,
}


def seeds(target: str) -> list[Path]:
    """The corpus of a target, by name."""
    return sorted((CORPUS / target).iterdir())
