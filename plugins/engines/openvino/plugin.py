"""OpenVINO, for ONNX files and for its own format."""

from millstream.services.plugin.plugin import Backend, Format, Plugin

PLUGIN = Plugin(
    name="openvino",
    extras={"openvino": ("openvino",), "nncf": ("nncf",)},
    backends=(
        Backend(name="openvino", factory="millstream.plugins.engines.openvino.worker:OpenVino", extra="openvino"),
    ),
    formats=(
        Format(
            name="openvino",
            recognises="millstream.plugins.engines.openvino.document:is_model_file",
            inspect="millstream.plugins.engines.openvino.inspection:inspect",
            backend="openvino",
            platform="openvino_ir",
            platform_backend="openvino",
        ),
    ),
    targets=(
        "millstream.plugins.engines.openvino.target:TARGETS",
        "millstream.plugins.engines.openvino.target_int8:TARGETS",
        "millstream.plugins.engines.openvino.target_int8_dynamic:TARGETS",
    ),
)
