"""TorchServe's inference and management API."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="torchserve",
    settings=("millstream.plugins.compat.torchserve.settings:TorchServeSettings",),
    http=("millstream.plugins.compat.torchserve.gateway:ADAPTER",),
)
