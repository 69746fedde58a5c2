"""Traces of requests, as OpenTelemetry defines them."""
