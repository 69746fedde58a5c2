"""Controller, planner and autoscaling."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="fleet",
    commands=(
        Command(
            name="autoscale",
            panel="Run",
            function="millstream.plugins.fleet.cli:autoscale",
            examples=(
                "millstream autoscale",
                "millstream autoscale explain cpu",
                "millstream autoscale compose --run --watch",
            ),
        ),
    ),
)
