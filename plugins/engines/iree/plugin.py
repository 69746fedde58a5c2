"""Functions of JAX and ONNX files, compiled by IREE."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="iree",
    needs=("compile", "jax"),
    extras={"iree": ("jax", "iree.compiler", "iree.runtime")},
    backends=(Backend(name="iree", factory="millstream.plugins.engines.iree.worker:Iree", extra="iree"),),
    targets=("millstream.plugins.engines.iree.target:TARGETS",),
)
