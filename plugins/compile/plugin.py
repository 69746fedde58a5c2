"""Races of compiled forms."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="compile",
    http=("millstream.plugins.compile.gateway.routes_races:ADAPTER",),
    devices=("millstream.plugins.compile.cli:target_checks",),
    model_section=("millstream.plugins.compile.gateway.routes_races:races_of",),
    worker=("millstream.plugins.compile.worker.jobs:build",),
    commands=(
        Command(
            name="race",
            panel="Models",
            function="millstream.plugins.compile.cli:race",
            examples=(
                "millstream race resnet",
                "millstream race resnet --samples images.npz --wait",
                "millstream race resnet --show --json",
            ),
        ),
        Command(
            name="compile",
            panel="Models",
            function="millstream.plugins.compile.cli:compile_",
            examples=("millstream compile undo resnet",),
        ),
    ),
)
