"""The record of the plug-in."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(name="simulated", backends=(Backend(name="simulated", factory="simulated_backend.worker:Simulated"),))
