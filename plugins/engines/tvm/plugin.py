"""ONNX files, compiled by TVM."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="tvm",
    needs=("compile",),
    extras={"tvm": ("tvm",)},
    backends=(Backend(name="tvm", factory="millstream.plugins.engines.tvm.worker:Tvm", pools=False),),
    targets=("millstream.plugins.engines.tvm.target:TARGETS",),
)
