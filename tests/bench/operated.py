"""Measures what operators turn on: keys, traces and TLS, each against an installation with default settings.

default settings ─ keys ─ traces of 1 % ─ traces of all ─ TLS ─ default settings ─ …
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np

from tests.bench import servers
from tests.bench.load import Load, Payload, json_payload
from tests.bench.result import Figure, Result
from tests.bench.rounds import Case, Say, measured, medians, ratio, rounds_of
from tests.bench.servers import ROOT, Server
from tests.kit import models

CONNECTIONS = 64
MODEL = "mlp"
CERTIFICATES = ROOT / "tests" / "integration" / "certificates"
#: name of a row and the lowest wanted rate, as a share of that with default settings
WANTED = {"keys on": 0.9, "traces of 1 %": 0.9, "traces of all": 0.3, "TLS": 0.6}


def _create_key(server: Server) -> str:
    """Create the first key of an installation: from then on each call needs one."""
    body = json.dumps({"name": "bench", "scopes": [f"infer:{MODEL}"]}).encode()
    request = Request(f"{server.url}/admin/v1/keys", body, {"Content-Type": "application/json"})
    with urlopen(request) as reply:
        return str(json.load(reply)["key"])


def _traced(collector: Server, share: float) -> dict[str, str]:
    return {
        "MILLSTREAM_TRACING": "true",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(share),
    }


def operated_rows(folder: Path, rounds: int, seconds: int, say: Say) -> Result:
    """Measure the MLP with one row of 64 floats in each request, with keys, traces or TLS against without."""
    row = np.round(np.random.default_rng(5).standard_normal(64), 4).astype(np.float32)
    payload = json_payload(folder, "input", row)
    served = {MODEL: models.mlp(folder / "operated.onnx")}
    certificate = ("--tls-cert", str(CERTIFICATES / "server.pem"), "--tls-key", str(CERTIFICATES / "server.key"))
    with ExitStack() as stack:
        collector = stack.enter_context(servers.ceiling(folder))  # answers 200 whatever comes
        plain = stack.enter_context(servers.millstream(folder, "plain", served))
        keys = stack.enter_context(servers.millstream(folder, "keys", served))
        some, every = (
            stack.enter_context(servers.millstream(folder, name, served, environment=_traced(collector, share)))
            for name, share in (("some", 0.01), ("every", 1.0))
        )
        tls = stack.enter_context(servers.millstream(folder, "tls", served, certificate))
        with_key = Payload(payload.path, (*payload.headers, f"Authorization: Bearer {_create_key(keys)}"))
        cases = [
            Case(f"Millstream, {name}", server, f"/v2/models/{MODEL}/infer", sent, CONNECTIONS)
            for name, server, sent in (
                ("default settings", plain, payload),
                ("keys on", keys, with_key),
                ("traces of 1 %", some, payload),
                ("traces of all", every, payload),
                ("TLS", tls, payload),
            )
        ]
        found = rounds_of(cases, rounds, seconds, say)
    return Result(_figures(found), measured(cases, found))


def _figures(found: Sequence[Sequence[Load]]) -> tuple[Figure, ...]:
    """Return the ratios; `found` has the default settings first, then the rows in the order of WANTED."""
    plain = medians(found[0])
    return tuple(
        Figure(
            name=f"{name}: rate at {CONNECTIONS} connections",
            measured=ratio(loads, found[0], lambda load: load.rate),
            bound=bound,
            unit="of that with default settings",
            detail=f"{medians(loads).rate:,.0f}/s of {plain.rate:,.0f}/s, "
            f"{medians(loads).cpu_us - plain.cpu_us:+.1f} us of CPU",
        )
        for (name, bound), loads in zip(WANTED.items(), found[1:], strict=True)
    )
