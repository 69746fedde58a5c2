"""Vertex AI's contract for prediction containers, on the codec of SageMaker's /invocations."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="vertex",
    needs=("sagemaker",),
    settings=("millstream.plugins.compat.vertex.settings:VertexSettings",),
    serve=("millstream.plugins.compat.vertex.settings:serving",),
    http=("millstream.plugins.compat.vertex.gateway:ADAPTER",),
)
