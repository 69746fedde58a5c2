"""Spans of requests, exported to a collector of OpenTelemetry."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="tracing",
    extras={
        "tracing": (
            "opentelemetry.exporter.otlp.proto.grpc",
            "opentelemetry.exporter.otlp.proto.http",
            "opentelemetry.sdk",
        )
    },
    settings=("millstream.plugins.tracing.settings:TracingSettings",),
    recorder=("millstream.plugins.tracing.gateway.setup:build",),
)
