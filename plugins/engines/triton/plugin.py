"""Runs on another server that speaks Triton's protocol."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="triton-backend",
    extras={"triton": ("tritonclient",)},
    backends=(Backend(name="triton", factory="millstream.plugins.engines.triton.worker:Triton", extra="triton"),),
)
