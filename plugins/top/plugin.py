"""What a server does now, in a terminal."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="top",
    commands=(
        Command(
            name="top",
            panel="Run",
            function="millstream.plugins.top.cli:top",
            examples=(
                "millstream top",
                "millstream top --sort p99 --interval 5",
                "millstream top --once --json",
            ),
        ),
    ),
)
