"""Those that tracing adds, beside OpenTelemetry's own variables."""

from __future__ import annotations

from pydantic import BaseModel, Field


class TracingSettings(BaseModel):
    """Settings of tracing."""

    tracing: bool = Field(
        False,
        description="Export traces of requests to an OpenTelemetry collector, as the variables `OTEL_…` say "
        "(docs/tracing.md). Needs `millstream[tracing]`.",
    )
    tracing_slow_s: float = Field(
        1.0,
        ge=0,
        description="Requests that take this many seconds are traced whatever the sampler says, and so are failed "
        "ones; 0: neither.",
    )
