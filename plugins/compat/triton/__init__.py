"""Triton's extensions of the v2 protocol, its model repositories and configurations."""
