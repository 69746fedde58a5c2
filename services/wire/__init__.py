"""The messages between gateways and workers."""
