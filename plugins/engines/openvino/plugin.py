"""OpenVINO, for ONNX files and for its own format."""

from millstream.services.plugin.plugin import Backend, Plugin

PLUGIN = Plugin(
    name="openvino",
    extras={"openvino": ("openvino",), "nncf": ("nncf",)},
    backends=(
        Backend(name="openvino", factory="millstream.plugins.engines.openvino.worker:OpenVino", extra="openvino"),
    ),
)
