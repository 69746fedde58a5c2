"""How many workers a fleet of models needs."""

from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="plan",
    needs=("fleet",),
    commands=(
        Command(
            name="plan",
            panel="Run",
            function="millstream.plugins.plan.cli:plan",
            examples=(
                "millstream plan --models 500 --workers 4 --memory 8GiB",
                "millstream plan --models 2000 --workers 8 --memory 4GiB --hours 24 --json",
                "millstream plan --models models.csv --trace calls.csv --workers 4 --memory 8GiB --compare",
                "millstream plan --models server --trace .millstream --pool gpu=1,memory=16GiB,speed=8 --pool cpu=2",
                "millstream plan --models server --trace calls.csv --memory 16GiB",
                "millstream plan --models .millstream/repository --trace calls.csv --json",
            ),
        ),
    ),
)
