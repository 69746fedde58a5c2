"""Protocols of other servers: one folder each."""
