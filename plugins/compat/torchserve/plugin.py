"""TorchServe's inference and management API."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="torchserve",
    http=("millstream.plugins.compat.torchserve.adapter:ADAPTER",),
)
