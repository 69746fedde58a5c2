"""Controller, planner and autoscaling."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="fleet",
    http=("millstream.plugins.fleet.gateway.routes_scale:ADAPTER",),
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
