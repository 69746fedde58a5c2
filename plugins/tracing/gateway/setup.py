"""setup: builds the tracer of a gateway from its settings."""

from __future__ import annotations

import logging
from functools import partial

from millstream.plugins.tracing.gateway.tracer import Tracer
from millstream.plugins.tracing.otel_variables import OtelVariables, read_variables
from millstream.plugins.tracing.sampler import Sampler
from millstream.plugins.tracing.settings import TracingSettings
from millstream.services.environment import variables_of
from millstream.services.extras import require
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import Settings, settings_of
from millstream.services.version import VERSION

log = logging.getLogger("millstream.tracing")

SERVICE, WORKER_SERVICE = "millstream-gateway", "millstream-worker"


def build(settings: Settings, registry: MetricsRegistry, name: str) -> Tracer | None:
    """Return the tracer of a gateway; None: traces are off.

    Raises Failure and OSError: traces are on, and their exporter cannot be built.
    """
    own = settings_of(settings, TracingSettings)
    variables = _variables() if own.tracing else None
    return None if variables is None else _tracer(settings, own.tracing_slow_s, variables, registry, name)


def _variables() -> OtelVariables | None:
    """Return what OpenTelemetry's variables say; None: they turn traces off. Raises Failure."""
    require("tracing")
    variables = read_variables(variables_of("OTEL_"))
    if variables.disabled:
        log.warning("traces are on, but OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER turns them off")
        return None
    return variables


def _tracer(
    settings: Settings, slow_s: float, variables: OtelVariables, registry: MetricsRegistry, name: str
) -> Tracer:
    # Imported only where traces are on: the messages of the protocol cost time and memory.
    from millstream.plugins.tracing.export import exporter
    from millstream.plugins.tracing.otlp import encode

    refused = registry.counter(TRACED_REQUESTS_DROPPED, "tail_limit").add
    return Tracer(
        exporter(variables.target),
        partial(
            encode,
            resource=_resource(settings, variables, name),
            worker_service=f"{variables.service}-worker" if variables.service else WORKER_SERVICE,
        ),
        registry,
        Sampler(variables.sampler, slow_s, refused).selected,
    )


def _resource(settings: Settings, variables: OtelVariables, name: str) -> dict[str, str]:
    """Return the attributes of this process. Source: OpenTelemetry, semantic conventions of resources."""
    return {
        **dict(variables.resource),
        "service.name": variables.service or SERVICE,
        "service.version": VERSION,
        "service.namespace": dict(variables.resource).get("service.namespace", settings.installation_name or ""),
        "service.instance.id": name,
        "telemetry.sdk.name": "millstream",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": VERSION,
    }
