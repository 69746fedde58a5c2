"""SageMaker's containers, and its runtime API."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="sagemaker",
    settings=("millstream.plugins.compat.sagemaker.settings:SageMakerSettings",),
    serve=("millstream.plugins.compat.sagemaker.settings:serving",),
    http=("millstream.plugins.compat.sagemaker.gateway:ADAPTER",),
    credentials=("millstream.plugins.compat.sagemaker.signed:CREDENTIALS",),
)
