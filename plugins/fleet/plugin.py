"""Controller, planner and autoscaling."""

from millstream.services.plugin.plugin import Command, Plugin, Process

PLUGIN = Plugin(
    name="fleet",
    settings=("millstream.plugins.fleet.settings:FleetSettings",),
    http=("millstream.plugins.fleet.gateway.routes_scale:ADAPTER",),
    gateway=("millstream.plugins.fleet.gateway.reporter:build",),
    supervisor=("millstream.plugins.fleet.supervisor:build",),
    process=(Process(name="controller", module="millstream.plugins.fleet.controller"),),
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
