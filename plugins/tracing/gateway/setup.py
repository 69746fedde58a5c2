"""Builds the tracer of a gateway from its settings and the environment variables of OpenTelemetry.

Source: OpenTelemetry specification, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
Variables for traces (OTEL_EXPORTER_OTLP_TRACES_…) take precedence over those for all signals (OTEL_EXPORTER_OTLP_…).
The exporters read most of them; what they take without a word, or in another unit, is checked and passed here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from millstream.plugins.tracing.sampler import HeadSampler, Sampler
from millstream.plugins.tracing.settings import TracingSettings
from millstream.services.environment import variables_of
from millstream.services.errors import invalid
from millstream.services.extras import require
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import Settings, settings_of
from millstream.services.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

    from millstream.plugins.tracing.gateway.tracer import Tracer

log = logging.getLogger("millstream.tracing")

SERVICE, WORKER_SERVICE = "millstream-gateway", "millstream-worker"
HTTP, GRPC = "http/protobuf", "grpc"
_BASE, _TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"
_TIMEOUT_MS, _TIMEOUT_MS_MAX = 10_000, 600_000
_OWN_HEADERS = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding"})
WORKERS_MAX = 256  # resources of workers that are remembered


def build(settings: Settings, registry: MetricsRegistry, name: str) -> Tracer | None:
    """Return the tracer of a gateway; None: traces are off.

    Raises Failure: traces are on, and their exporter cannot be built.
    """
    own = settings_of(settings, TracingSettings)
    if not own.tracing:
        return None
    require("tracing")
    given = variables_of("OTEL_")
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none":
        log.warning("traces are on, but OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER turns them off")
        return None
    # Imported only where traces are on: the libraries cost time and memory.
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    from millstream.plugins.tracing.gateway.request_spans import SpanMaker
    from millstream.plugins.tracing.gateway.tracer import Tracer

    # Their records repeat for each export, and may hold the keys of headers: Tracer says what fails.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    refused = registry.counter(TRACED_REQUESTS_DROPPED, "tail_limit").add
    spans_of = SpanMaker(_resources(settings, name), RandomIdGenerator()).spans_of
    return Tracer(exporter(given), spans_of, registry, Sampler(sampler(given), own.tracing_slow_s, refused).selected)


def _resources(settings: Settings, name: str) -> Callable[[str], Resource]:
    """Return the function that returns the resource of a worker, and of "", which is this process."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    class Known(Resource):
        """A resource that is one object for each process: the encoder, which groups by it, need not compare texts."""

        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            return self is other

    given = OTELResourceDetector().detect().attributes
    service = given.get("service.name")
    own = Resource.create(
        {
            "service.name": service or SERVICE,
            "service.version": VERSION,
            "service.namespace": given.get("service.namespace") or settings.installation_name or "",
            "service.instance.id": name,
        }
    )

    this = Known(own.attributes)

    @lru_cache(WORKERS_MAX)
    def resource_of(worker: str) -> Resource:
        if not worker:
            return this
        called = f"{service}-worker" if service else WORKER_SERVICE
        return Known({**this.attributes, "service.name": called, "service.instance.id": worker})

    return resource_of


def exporter(given: Mapping[str, str]) -> SpanExporter:
    """Return the exporter that the variables name. Raises Failure(INVALID) that names a variable."""
    for name, value in given.items():
        if not value.isprintable():
            raise invalid(f"{name}: it has control characters, or is not UTF-8")
    name, protocol = _first(given, "PROTOCOL")
    if (protocol or HTTP) not in {HTTP, GRPC}:
        raise invalid(f"{name}: {protocol!r} is not supported: set it to {HTTP} or {GRPC}")
    name, timeout = _first(given, "TIMEOUT")
    timeout_ms = _number(name, timeout) if timeout else _TIMEOUT_MS
    if not 1 <= timeout_ms <= _TIMEOUT_MS_MAX:
        raise invalid(f"{name}: it must be milliseconds from 1 to {_TIMEOUT_MS_MAX}")
    name, compression = _first(given, "COMPRESSION")
    if compression not in {"", "none", "gzip"}:
        raise invalid(f"{name}: {compression!r} is not supported: set it to gzip or none")
    for kind in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
        name, path = _first(given, kind)
        if path and not Path(path).is_file():
            raise invalid(f"{name}: there is no such file")
    _check_endpoint(*_first(given, "ENDPOINT"), grpc=protocol == GRPC)
    _check_headers(*_first(given, "HEADERS"))
    # The exporters read a timeout in seconds; the specification says milliseconds.
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(timeout=timeout_ms / 1000)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(timeout=timeout_ms / 1000)


def sampler(given: Mapping[str, str]) -> HeadSampler:
    """Return the sampler that the variables name. Raises Failure(INVALID) that names a variable."""
    kind = given.get("OTEL_TRACES_SAMPLER", "parentbased_always_on")
    base = kind.removeprefix("parentbased_")
    if base not in {"always_on", "always_off", "traceidratio"}:
        raise invalid(
            f"OTEL_TRACES_SAMPLER: {kind!r} is not supported: set it to always_on, always_off or traceidratio, or to "
            "one of them after parentbased_"
        )
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(base)
    if ratio is None:
        ratio = _number("OTEL_TRACES_SAMPLER_ARG", given.get("OTEL_TRACES_SAMPLER_ARG", "1"))
        if ratio > 1:
            raise invalid("OTEL_TRACES_SAMPLER_ARG: it must be a share from 0 to 1")
    return HeadSampler(ratio, parent_based=base != kind)


def _check_endpoint(name: str, url: str, *, grpc: bool) -> None:
    try:
        parts = urlsplit(url if "://" in url or not grpc else f"http://{url}")
        usable = not url or (parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0)
    except ValueError:
        usable = False
    if not usable:
        raise invalid(f"{name}: it must be a URL like http://HOST:PORT")


def _check_headers(name: str, text: str) -> None:
    """Raise Failure(INVALID) for what the exporters would leave out; without a value, which may be a key."""
    from opentelemetry.util.re import parse_env_headers

    pairs = [pair for pair in text.split(",") if pair.strip()]
    for number, pair in enumerate(pairs, 1):
        headers = parse_env_headers(pair, liberal=True)
        if not headers or not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise invalid(f"{name}: pair {number} is no header as NAME=VALUE, percent-encoded, in printable ASCII")
        if not _OWN_HEADERS.isdisjoint(headers):
            raise invalid(f"{name}: pair {number} is a header that the export itself sets")


def _first(given: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the variable that says `name` for traces, and its value; ("", "") if none does."""
    return next(((key, given[key]) for key in (_TRACES + name, _BASE + name) if key in given), ("", ""))


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise invalid(f"{name}: {text!r} is no number")
    return number
