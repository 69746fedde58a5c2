"""Programs of torch.export."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="torch",
    extras={"torch": ("torch",)},
    backends=(Backend(name="torch", factory="millstream.plugins.engines.torch.worker:Torch", extra="torch"),),
)
