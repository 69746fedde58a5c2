"""The web console: what a server does now, and its models, workers and keys, in a browser."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(
    name="console",
    http=("millstream.plugins.console.gateway.routes_console:ADAPTER",),
    gateway=("millstream.plugins.console.gateway.hub:build",),
)
