"""The pure parts of tracing: the header, the samplers, and the variables of OpenTelemetry."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace.export import SpanExportResult

from millstream.gateway.observing.finished import Finished
from millstream.gateway.observing.observer import Observer, Wants
from millstream.plugins.tracing.gateway.setup import build, exporter, sampler
from millstream.plugins.tracing.sampler import TAIL_RATE_MAX, HeadSampler, Sampler
from millstream.services.environment import ENVIRONMENT, variables_of
from millstream.services.errors import Failure
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import settings_class
from millstream.services.traceparent import Trace, TraceContext, context_of, is_sampled, trace_id_of, usable_traceparent
from tests.kit.otlp import http_collector
from tests.kit.tls import CERTIFICATES

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = f"00-{TRACE}-{SPAN}-01".encode()
PARENT = TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN))


class Kept:
    """Keeps the calls that its sampler selects; all without one."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.requests: list[Finished] = []
        self.wants: Wants | None = None if sampler is None else sampler.selected
        self.traces = True

    def start(self) -> None:
        return

    def add(self, request: Finished) -> None:
        self.requests.append(request)

    def close(self) -> None:
        return


def test_traceparent_of_a_caller_is_read() -> None:
    assert usable_traceparent(b" " + SENT + b" ") == SENT
    assert context_of(SENT) == PARENT
    assert is_sampled(SENT)
    assert not is_sampled(SENT[:-1] + b"2")
    assert trace_id_of(SENT) == TRACE
    assert trace_id_of(None) == ""


def test_traceparent_of_a_later_version_is_read_as_the_first() -> None:
    assert usable_traceparent(b"cc" + SENT[2:] + b"-what-the-future") == SENT
    assert usable_traceparent(b"cc" + SENT[2:] + b".what") is None


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        SENT[:-1],
        SENT + b"-more",
        b"ff" + SENT[2:],
        SENT.upper(),
        SENT.replace(TRACE.encode(), b"0" * 32),
        SENT.replace(SPAN.encode(), b"0" * 16),
        b"00-" + b"\xe9" * 32 + SENT[35:],
    ],
)
def test_invalid_traceparent_is_none(sent: bytes) -> None:
    assert usable_traceparent(sent) is None


def test_trace_that_begins_here_has_no_parent() -> None:
    assert context_of(1) == TraceContext((1).to_bytes(16), b"")
    assert trace_id_of(1) == f"{1:032x}"


def made(head: HeadSampler, slow_s: float = 0.0, refused: Callable[[], None] = lambda: None) -> Sampler:
    return Sampler(head, slow_s, refused)


def head_selects(head: HeadSampler, trace: Trace, *, reads: bool = False) -> bool:
    return made(head).selected(trace, 0.0, 1.0, failed=False, reads=reads)


def test_head_sampler_follows_the_caller_or_the_ratio() -> None:
    unsampled = SENT[:-1] + b"0"
    assert head_selects(HeadSampler(0.0), SENT, reads=True)
    assert not head_selects(HeadSampler(1.0), unsampled)
    assert head_selects(HeadSampler(1.0, parent_based=False), unsampled, reads=True)
    assert not head_selects(HeadSampler(0.0, parent_based=False), SENT)
    assert head_selects(HeadSampler(1.0), 7)
    assert head_selects(HeadSampler(1.0), (1 << 128) - 1)
    assert not head_selects(HeadSampler(1.0), 7, reads=True)
    assert not head_selects(HeadSampler(0.0), 1 << 64)
    kept = sum(head_selects(HeadSampler(0.25), number) for number in range(0, 1 << 64, 1 << 56))
    assert kept == 64


def test_a_trace_is_sampled_alike_here_and_by_a_later_sampler_of_the_same_ratio() -> None:
    """The ratio is compared with the same bits of a trace that begins here and of a caller's."""
    ratio = HeadSampler(0.25, parent_based=False)
    for number in (0x3FFF << 48, 0x4000 << 48, (1 << 127) + 5):
        sent = f"00-{number:032x}-{SPAN}-00".encode()
        assert head_selects(ratio, number) == head_selects(ratio, sent)


def test_share_of_the_new_traces_that_is_sampled() -> None:
    """10,000 of a million are expected: fewer than 9,000 or more than 11,000 come about in none of 1e22 runs."""
    observer = Observer((Kept(made(HeadSampler(0.01))),))
    selected = sum(bool(observer.takers(observer.trace(None), 1.0, 1.0, failed=False)) for _ in range(1_000_000))
    assert 9_000 < selected < 11_000


def test_slow_and_failed_requests_are_selected_up_to_a_limit() -> None:
    refused: list[int] = []
    sampler = made(HeadSampler(0.0), 1.0, lambda: refused.append(1))

    def selects(seconds: float, now: float, *, failed: bool = False, of: Sampler = sampler) -> bool:
        return of.selected(SENT[:-1] + b"0", seconds, now, failed=failed, reads=False)

    assert selects(1.0, 5.0)
    assert selects(0.1, 5.0, failed=True)
    assert not selects(0.9, 5.0)
    assert sum(selects(2.0, 6.5, failed=True) for _ in range(300)) == TAIL_RATE_MAX
    assert len(refused) == 300 - TAIL_RATE_MAX
    assert selects(2.0, 7.0, failed=True)
    assert not selects(100.0, 8.0, failed=True, of=made(HeadSampler(0.0), 0.0))


def test_variables_for_traces_take_precedence_and_timeouts_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_collector() as collector:
        given = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9/nowhere",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20abc, x-a = 1 ",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "soon",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2000",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": " ",
        }
        for name, value in given.items():
            monkeypatch.setitem(ENVIRONMENT, name, value)
        sends = exporter(variables_of("OTEL_"))
        assert sends.export([]) is SpanExportResult.SUCCESS
        sends.shutdown()
        sent = {name.lower(): value for name, value in collector.headers[0].items()}
        assert (sent["authorization"], sent["x-a"], sent["content-encoding"]) == ("Basic abc", "1", "gzip")
    assert "OTEL_EXPORTER_OTLP_CERTIFICATE" not in ENVIRONMENT, "an empty variable counts as unset"


@pytest.mark.parametrize("trusted", [True, False])
def test_a_collector_over_tls_is_trusted_by_its_certificate(monkeypatch: pytest.MonkeyPatch, trusted: bool) -> None:
    with http_collector(tls=server_tls()) as collector:
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # the HTTP library prefers them
            monkeypatch.delenv(name, raising=False)
        if trusted:
            monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_CERTIFICATE", str(CERTIFICATES / "ca.pem"))
        sends = exporter(variables_of("OTEL_"))
        assert (sends.export([]) is SpanExportResult.SUCCESS) is trusted
        sends.shutdown()
        assert len(collector.bodies) == trusted


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body, and headers with keys, would go to another host."""
    with http_collector() as collector, http_collector() as other:
        collector.statuses += [307]
        collector.location = f"{other.url}/v1/traces"
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setitem(ENVIRONMENT, "OTEL_EXPORTER_OTLP_TIMEOUT", "500")
        sends = exporter(variables_of("OTEL_"))
        sends.export([])
        sends.shutdown()
        assert (other.headers, other.bodies) == ([], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:99999999"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),  # a socket that does not wait
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1e300"),  # beyond what a socket takes
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret-without-a-name"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-a=secret%C3%A9"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a secret=1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "Content-Length=5"),  # a collector would wait for the rest
        ("OTEL_RESOURCE_ATTRIBUTES", "a=\udcff"),  # bytes that are not UTF-8: no span could be encoded
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/none"),
        ("OTEL_TRACES_SAMPLER", "xray"),
    ],
)
def test_wrong_variable_is_named_without_secrets(name: str, value: str) -> None:
    with pytest.raises(Failure, match=f"^{name}: ") as refused:
        given = {name: value}
        exporter(given)
        sampler(given)
    assert "secret" not in refused.value.message


def test_ratio_beyond_its_range_is_refused() -> None:
    with pytest.raises(Failure, match="OTEL_TRACES_SAMPLER_ARG"):
        sampler({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"})


@pytest.mark.parametrize("variable", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_variables_turn_traces_off(monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]) -> None:
    monkeypatch.setitem(ENVIRONMENT, *variable)
    assert build(settings_class().model_validate({"tracing": True}), MetricsRegistry(None, "test"), "gateway-0") is None


def test_samplers_of_the_specification() -> None:
    assert sampler({}) == HeadSampler(1.0, parent_based=True)
    given = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    assert sampler(given) == HeadSampler(0.1, parent_based=False)


def server_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    return context
