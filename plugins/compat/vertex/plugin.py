"""Vertex AI's contract for prediction containers, on the codec of SageMaker's /invocations."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="vertex",
    needs=("sagemaker",),
    http=("millstream.plugins.compat.vertex.gateway:ADAPTER",),
)
