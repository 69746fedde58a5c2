"""Functions that jax.export serialized."""

from millstream.services.plugin.plugin import Backend, Format, Plugin

PLUGIN = Plugin(
    name="jax",
    extras={"jax": ("jax",)},
    backends=(Backend(name="jax", factory="millstream.plugins.engines.jax.worker:Jax", extra="jax"),),
    formats=(
        Format(
            name="jax-export",
            recognises="millstream.plugins.engines.jax.document:is_export_file",
            inspect="millstream.plugins.engines.jax.inspection:inspect",
            backend="jax",
            platform="jax_export",
            platform_backend="jax",
            file="model.jax",
        ),
    ),
    targets=("millstream.plugins.engines.jax.target:TARGETS",),
)
