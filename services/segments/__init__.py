"""Shared memory between a gateway and the workers on its host; the gateway owns all of it."""
