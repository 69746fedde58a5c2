"""Triton's extensions of the v2 protocol, its model repositories and its configurations."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="triton",
    gateway=("millstream.plugins.compat.triton.gateway:build",),
)
