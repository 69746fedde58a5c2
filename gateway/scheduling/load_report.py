"""The load of a version's lane, for load balancers, as the header endpoint-load-metrics. Pure.

Source: ORCA (Open Request Cost Aggregation), xds/data/orca/v3/orca_load_report.proto, and its forms in a header, TEXT,
JSON and BIN; Triton's and vLLM's request header endpoint-load-metrics-format.
"""

from __future__ import annotations

import base64
import struct
from typing import NamedTuple

import orjson

HEADER = b"endpoint-load-metrics"
TEXT, JSON, BIN = b"TEXT", b"JSON", b"BIN"
_FORMATS = frozenset({TEXT, JSON, BIN})

# Protocol Buffers: tags of OrcaLoadReport and of an entry of a map
_NAMED_METRICS = b"\x42"  # field 8, with a length
_APPLICATION_UTILIZATION = b"\x49"  # field 9, a double
_KEY, _VALUE = b"\x0a", b"\x11"  # field 1, with a length; field 2, a double


class LaneLoad(NamedTuple):
    """The load of one version in one gateway."""

    utilization: float  # batches in flight, as a share of those that may be; 1: further requests wait
    rows_waiting: int
    batches_in_flight: int
    instances: int


def wanted_format(value: bytes) -> bytes | None:
    """Return the format that a request header asks for, in any case; None for another word."""
    wanted = value.strip().upper()
    return wanted if wanted in _FORMATS else None


def load_report(load: LaneLoad, wanted: bytes) -> bytes:
    """Return the value of the header in the `wanted` format."""
    named = {
        "rows_waiting": load.rows_waiting,
        "batches_in_flight": load.batches_in_flight,
        "instances": load.instances,
    }
    if wanted == JSON:
        document = {"application_utilization": load.utilization, "named_metrics": named}
        return b"JSON %b" % orjson.dumps(document)
    if wanted == TEXT:
        parts = [f"application_utilization={load.utilization:g}"]
        parts += [f"named_metrics.{name}={value}" for name, value in named.items()]
        return b"TEXT %b" % ", ".join(parts).encode()
    message = b"".join(
        [
            *[_entry(name.encode(), value) for name, value in named.items()],
            _APPLICATION_UTILIZATION,
            struct.pack("<d", load.utilization),
        ]
    )
    return b"BIN %b" % base64.b64encode(message)


def _entry(name: bytes, value: float) -> bytes:
    """Return an entry of `named_metrics`. All lengths are below 128, so each takes one byte."""
    entry = b"".join((_KEY, bytes((len(name),)), name, _VALUE, struct.pack("<d", value)))
    return b"".join((_NAMED_METRICS, bytes((len(entry),)), entry))
