"""Programs of torch.export."""

from millstream.services.plugin.plugin import Backend, Format, Plugin

PLUGIN = Plugin(
    name="torch",
    extras={"torch": ("torch",)},
    backends=(Backend(name="torch", factory="millstream.plugins.engines.torch.worker:Torch", extra="torch"),),
    formats=(
        Format(
            name="torch-export",
            recognises="millstream.plugins.engines.torch.archive:is_program_file",
            inspect="millstream.plugins.engines.torch.inspection:inspect",
            backend="torch",
            platform="torch_export",
            platform_backend="pytorch",
            file="model.pt2",
        ),
    ),
    targets=("millstream.plugins.engines.torch.aotinductor:TARGETS",),
)
