"""OpenAI's embeddings API."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="openai",
    needs=("prepare",),
    http=("millstream.plugins.compat.openai.gateway:ADAPTER",),
)
