"""Triton's extensions over gRPC."""
