"""Functions that jax.export serialized."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="jax",
    extras={"jax": ("jax",)},
    backends=(Backend(name="jax", factory="millstream.plugins.engines.jax.worker:Jax", extra="jax"),),
)
