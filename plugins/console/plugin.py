"""The web console: what a server does now, and its models, workers and keys, in a browser."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="console",
    settings=("millstream.plugins.console.settings:ConsoleSettings",),
    http=("millstream.plugins.console.gateway.routes_console:ADAPTER",),
    gateway=("millstream.plugins.console.gateway.hub:build",),
    commands=(
        Command(
            name="console",
            panel="Run",
            function="millstream.plugins.console.cli:console",
            examples=("millstream console", "millstream console --open"),
        ),
    ),
)
