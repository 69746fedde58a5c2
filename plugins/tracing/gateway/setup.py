"""setup: builds the tracer of a gateway from its settings."""

from __future__ import annotations

import logging
from functools import partial

from millstream.plugins.tracing.gateway.tracer import Tracer
from millstream.plugins.tracing.otel_variables import OtelVariables
from millstream.plugins.tracing.sampler import Sampler
from millstream.services.environment import otel_variables
from millstream.services.extras import require
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import Settings
from millstream.services.version import VERSION

log = logging.getLogger("millstream.tracing")

SERVICE, WORKER_SERVICE = "millstream-gateway", "millstream-worker"


def build(settings: Settings, registry: MetricsRegistry, name: str) -> Tracer | None:
    """Return the tracer of a gateway; None: traces are off.

    Raises Failure and OSError: traces are on, and their exporter cannot be built.
    """
    variables = _variables() if settings.tracing else None
    return None if variables is None else _tracer(settings, variables, registry, name)


def _variables() -> OtelVariables | None:
    """Return what OpenTelemetry's variables say; None: they turn traces off. Raises Failure."""
    require("tracing")
    variables = otel_variables()
    if variables.disabled:
        log.warning("traces are on, but OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER turns them off")
        return None
    return variables


def _tracer(settings: Settings, variables: OtelVariables, registry: MetricsRegistry, name: str) -> Tracer:
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
        Sampler(variables.sampler, settings.tracing_slow_s, refused).selected,
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
