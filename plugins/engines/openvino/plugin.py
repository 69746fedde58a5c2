"""OpenVINO, for ONNX files and for its own format."""

from pathlib import Path

from millstream.services.plugin.plugin import Backend, Format, Plugin

_HEAD_BYTES = 4096


def is_model_file(path: Path) -> bool:
    """Return whether the file is the document of a model. Raises OSError."""
    if path.suffix != ".xml":
        return False
    with path.open("rb") as file:
        return b"<net " in file.read(_HEAD_BYTES)


PLUGIN = Plugin(
    name="openvino",
    extras={"openvino": ("openvino",), "nncf": ("nncf",)},
    backends=(
        Backend(name="openvino", factory="millstream.plugins.engines.openvino.worker:OpenVino", extra="openvino"),
    ),
    formats=(
        Format(
            name="openvino",
            recognises="millstream.plugins.engines.openvino.plugin:is_model_file",
            inspect="millstream.plugins.engines.openvino.inspection:inspect",
            backend="openvino",
            platform="openvino_ir",
            platform_backend="openvino",
        ),
    ),
    targets=("millstream.plugins.engines.openvino.targets:TARGETS",),
)
