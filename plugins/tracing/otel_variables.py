"""otel_variables: the environment variables of OpenTelemetry that Millstream follows. Pure.

Source: OpenTelemetry specification, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
Variables for traces (OTEL_EXPORTER_OTLP_TRACES_…) take precedence over those for all signals (OTEL_EXPORTER_OTLP_…).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from millstream.plugins.tracing.sampler import HeadSampler
from millstream.services.errors import Failure, invalid

HTTP, GRPC = "http/protobuf", "grpc"
_TRACES_PATH = "/v1/traces"
_DEFAULTS = {HTTP: "http://localhost:4318", GRPC: "http://localhost:4317"}
_TIMEOUT_MS = 10_000
_TIMEOUT_MS_MAX = 600_000
#: names of headers (RFC 9110, token) and of gRPC's metadata; values that both can carry
_NAMES = {HTTP: re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"), GRPC: re.compile(r"[0-9a-z_.-]+(?<!-bin)")}
_VALUE = re.compile(r"[\x20-\x7e]*")
#: headers that say how an export is sent
_OWN_HEADERS = frozenset({"content-type", "content-encoding", "content-length", "transfer-encoding"})
_BASE, _TRACES = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"


@dataclass(frozen=True, slots=True)
class OtlpTarget:
    """Where and how spans are exported."""

    url: str  # with its path for http/protobuf
    protocol: str = HTTP
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # may hold keys
    timeout_s: float = _TIMEOUT_MS / 1000
    gzip: bool = False
    ca_file: Path | None = None  # certificates that are trusted; None: the system's
    client_key: Path | None = None
    client_certificate: Path | None = None
    insecure: bool = False  # gRPC without TLS


@dataclass(frozen=True, slots=True)
class OtelVariables:
    """What the variables say."""

    target: OtlpTarget
    sampler: HeadSampler = field(default_factory=HeadSampler)
    service: str = ""  # "": the process names itself
    resource: tuple[tuple[str, str], ...] = ()
    disabled: bool = False


def read_variables(environment: Mapping[str, str]) -> OtelVariables:
    """Return what the variables of an environment say. An empty variable counts as unset.

    Raises:
        Failure: INVALID: a value is none of those that the specification allows; the message names the variable.
    """
    given = {name: value.strip() for name, value in environment.items() if name.startswith("OTEL_") and value.strip()}
    for name, value in given.items():
        if not value.isprintable():
            raise invalid(f"{name}: it has control characters, or is not UTF-8")
    resource = dict(_pairs("OTEL_RESOURCE_ATTRIBUTES", given))
    service = given.get("OTEL_SERVICE_NAME") or resource.pop("service.name", "")
    resource.pop("service.name", None)
    off = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_TRACES_EXPORTER") == "none"
    return OtelVariables(_target(given), _sampler(given), service, tuple(resource.items()), off)


def _target(given: Mapping[str, str]) -> OtlpTarget:
    name, protocol = _first(given, "PROTOCOL")
    protocol = protocol or HTTP
    if protocol not in _DEFAULTS:
        raise invalid(f"{name}: {protocol!r} is not supported: set it to {HTTP} or {GRPC}")
    name, timeout = _first(given, "TIMEOUT")
    timeout_ms = _number(name, timeout) if timeout else _TIMEOUT_MS
    if not 1 <= timeout_ms <= _TIMEOUT_MS_MAX:
        raise invalid(f"{name}: it must be milliseconds from 1 to {_TIMEOUT_MS_MAX}")
    name, compression = _first(given, "COMPRESSION")
    if compression not in {"", "none", "gzip"}:
        raise invalid(f"{name}: {compression!r} is not supported: set it to gzip or none")
    url, insecure = _endpoint(given, protocol)
    name, _ = _first(given, "HEADERS")
    return OtlpTarget(
        url,
        protocol,
        _headers(name, protocol, given),
        timeout_ms / 1000,
        compression == "gzip",
        _file(given, "CERTIFICATE"),
        _file(given, "CLIENT_KEY"),
        _file(given, "CLIENT_CERTIFICATE"),
        insecure,
    )


def _headers(name: str, protocol: str, given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the headers. Raises Failure(INVALID), without a value: the libraries would show it with each export."""
    headers = tuple((key.lower(), value) for key, value in _pairs(name, given))
    for number, (key, value) in enumerate(headers, 1):
        if not _NAMES[protocol].fullmatch(key):
            raise invalid(f"{name}: pair {number} has a name that is none of a header of {protocol}")
        if key in _OWN_HEADERS:
            raise invalid(f"{name}: {key} is set by the export itself")
        if not _VALUE.fullmatch(value):
            raise invalid(f"{name}: the value of {key} has characters other than printable ASCII")
    return headers


def _endpoint(given: Mapping[str, str], protocol: str) -> tuple[str, bool]:
    """Return the URL, and whether it is without TLS."""
    name, url = _first(given, "ENDPOINT")
    url = url or _DEFAULTS[protocol]
    if protocol == GRPC and "://" not in url:
        _, insecure = _first(given, "INSECURE")
        url = f"{'http' if insecure.lower() == 'true' else 'https'}://{url}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise invalid(f"{name or f'{_BASE}ENDPOINT'}: it must be a URL like http://HOST:PORT")
    if protocol == HTTP and name != f"{_TRACES}ENDPOINT":
        url = url.rstrip("/") + _TRACES_PATH
    return url, parts.scheme == "http"


def _sampler(given: Mapping[str, str]) -> HeadSampler:
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


def _first(given: Mapping[str, str], name: str) -> tuple[str, str]:
    """Return the variable that says `name` for traces, and its value; ("", "") if none does."""
    return next(((key, given[key]) for key in (_TRACES + name, _BASE + name) if key in given), ("", ""))


def _file(given: Mapping[str, str], name: str) -> Path | None:
    key, path = _first(given, name)
    if path and not Path(path).is_file():
        raise invalid(f"{key}: there is no such file")
    return Path(path) if path else None


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise invalid(f"{name}: it must be a number, at least 0")
    return number


def _pairs(name: str, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the pairs of `a=1,b=2`, percent-decoded. Raises Failure(INVALID), without the value: it may hold a key."""
    pairs = []
    for part in filter(str.strip, given.get(name, "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise _not_pairs(name)
        pairs.append((unquote(key.strip()), unquote(value.strip())))
    return pairs


def _not_pairs(name: str) -> Failure:
    return invalid(f"{name}: it must be pairs like a=1,b=2")
