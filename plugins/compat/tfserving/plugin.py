"""TensorFlow Serving's REST and gRPC API, and KServe's V1."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="tfserving",
    http=("millstream.plugins.compat.tfserving.gateway:ADAPTER",),
    grpc=(
        "millstream.plugins.compat.tfserving.grpc.calls:PREDICTION",
        "millstream.plugins.compat.tfserving.grpc.calls:MODEL",
    ),
)
