"""setup: builds the observer of a gateway from its settings."""

from __future__ import annotations

import logging
from functools import partial

from millstream.gateway.observing.access_log import AccessLog, block_writer, json_text, stdout_writer, text_line
from millstream.gateway.observing.observer import Observer, Sink
from millstream.plugins.tracing.gateway.tracer import Tracer
from millstream.plugins.tracing.otel_variables import OtelVariables
from millstream.plugins.tracing.sampler import Sampler
from millstream.services.environment import otel_variables
from millstream.services.extras import require
from millstream.services.metrics.catalogue import TRACED_REQUESTS_DROPPED
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.settings import Settings
from millstream.services.supervisor.log import LogFile
from millstream.services.supervisor.log_names import ACCESS_SUFFIX as FILE_SUFFIX
from millstream.services.version import VERSION

log = logging.getLogger("millstream.tracing")

SERVICE, WORKER_SERVICE = "millstream-gateway", "millstream-worker"


class Observing:
    """The observer of a gateway and what it passes requests on to; `observer` None: nothing is observed.

    Raises Failure and OSError: traces are on, and their exporter cannot be built.
    """

    def __init__(self, settings: Settings, registry: MetricsRegistry, name: str) -> None:
        self.tracer: Tracer | None = None
        self.access_log: AccessLog | None = None
        sampler = None
        sinks: list[Sink] = []
        variables = _variables() if settings.tracing else None
        if variables is not None:
            self.tracer = _tracer(settings, variables, registry, name)
            refused = registry.counter(TRACED_REQUESTS_DROPPED, "tail_limit").add
            sampler = Sampler(variables.sampler, settings.tracing_slow_s, refused)
            sinks.append(self.tracer)
        if settings.access_log != "off":
            self.access_log = _access_log(settings, registry, name)
            sinks.append(self.access_log)
        self.observer = Observer(sampler, tuple(sinks)) if sinks else None

    def start(self) -> None:
        """Start the threads."""
        if self.tracer is not None:
            self.tracer.start()
        if self.access_log is not None:
            self.access_log.start()

    def close(self) -> None:
        """Export and write what waits, and end the threads. Blocks for some seconds at most."""
        if self.tracer is not None:
            self.tracer.close()
        if self.access_log is not None:
            self.access_log.close()


def _access_log(settings: Settings, registry: MetricsRegistry, name: str) -> AccessLog:
    if settings.access_log == "file":
        folder = settings.home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        write = block_writer(LogFile(folder / f"{name}{FILE_SUFFIX}.log"))
    else:
        write = stdout_writer()
    return AccessLog(write, json_text(name) if settings.log_format == "json" else text_line, registry)


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

    return Tracer(
        exporter(variables.target),
        partial(
            encode,
            resource=_resource(settings, variables, name),
            worker_service=f"{variables.service}-worker" if variables.service else WORKER_SERVICE,
        ),
        registry,
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
