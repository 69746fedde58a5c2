"""FastAPI's own OpenTelemetry: off, whatever the environment says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import telemetry
from opentelemetry import trace

from tests.kit.application import Application

pytestmark = pytest.mark.anyio


class _Provider(trace.TracerProvider):
    """A provider as an SDK registers it; counts the tracers that were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def get_tracer(self, *_: Any, **__: Any) -> trace.Tracer:
        self.asked += 1
        return trace.NoOpTracer()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")


async def test_no_variable_turns_telemetry_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = _Provider()
    monkeypatch.setattr("fastapi.telemetry._asgi.trace.get_tracer_provider", lambda: provider)
    app = Application(tmp_path).app
    seen = []

    @app.get("/seen")
    async def endpoint() -> None:
        seen.append(telemetry.get_telemetry_data() is not None)

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client:
        assert (await client.get("/seen")).status_code == 200
    assert seen == [False]
    assert provider.asked == 0
