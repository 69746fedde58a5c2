"""The `millstream` command: registers the subcommands, and prints one line on standard error for a failure.

Command modules import large packages when they run, so that `millstream --help` does not wait for numpy.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from millstream.plugins.compile.cli import race
from millstream.plugins.compile.cli_compile import compile_
from millstream.plugins.fleet.cli import autoscale
from millstream.plugins.plan.cli import plan
from millstream.plugins.top.cli import top
from millstream.services.cli import failures
from millstream.services.cli.commands.bench import bench
from millstream.services.cli.commands.configure import configure
from millstream.services.cli.commands.demo import demo, version, version_text
from millstream.services.cli.commands.describe import describe
from millstream.services.cli.commands.doctor import doctor
from millstream.services.cli.commands.keys import audit, keys
from millstream.services.cli.commands.load import load, unload
from millstream.services.cli.commands.logs import logs
from millstream.services.cli.commands.models import activate, models, rm
from millstream.services.cli.commands.placement import placement
from millstream.services.cli.commands.predict import predict
from millstream.services.cli.commands.push import push
from millstream.services.cli.commands.restart import restart
from millstream.services.cli.commands.serve import serve
from millstream.services.cli.commands.up import up
from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.help import HelpCommand, HelpGroup
from millstream.services.cli.options import Endpoint, Key, Shared
from millstream.services.cli.terminal import prepare_streams

app = typer.Typer(
    name="millstream",
    cls=HelpGroup,
    help="Serve ONNX models over REST and gRPC, with dynamic batching, on your own machines.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="millstream up\nmillstream demo   # in another terminal",
)


_CALL_NO_SERVER = frozenset({"serve", "up", "version"})


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"millstream {version_text()}")
        raise typer.Exit


ShowVersion = Annotated[
    bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Print the version and exit.")
]


@app.callback(invoke_without_command=True)
def shared(
    context: typer.Context,
    version: ShowVersion = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    del version  # its callback has done it
    if (endpoint or key) and context.invoked_subcommand in _CALL_NO_SERVER:
        given = "--endpoint" if endpoint else "--key"
        raise wrong_usage(f"{given}: `{context.invoked_subcommand}` calls no server")
    context.obj = Shared(endpoint, key)
    if context.invoked_subcommand is None:
        print(context.get_help())


def _add(panel: str, command: Callable[..., None], *examples: str) -> None:
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(
        command.__name__.rstrip("_"),
        cls=HelpCommand,
        rich_help_panel=panel,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog="\n".join(examples),
    )(command)


_add(
    "Run",
    up,
    "millstream up",
    "millstream up --pool cpu=2 --gateways 2 --preload resnet=resnet18.onnx",
    "millstream up --memory 8GiB",
    "millstream up --pool cpu=1:4",
    "millstream up --pool gpu=1,memory=16GiB --pool cpu=2,threads=4,memory=8GiB",
)
_add(
    "Run",
    autoscale,
    "millstream autoscale",
    "millstream autoscale explain cpu",
    "millstream autoscale compose --run --watch",
)
_add("Run", top, "millstream top", "millstream top --sort p99 --interval 5", "millstream top --once --json")
_add("Run", restart, "millstream restart", "millstream restart workers --json")
_add("Run", logs, "millstream logs -f", "millstream logs gateway -n 20", "millstream logs -f digits --json")
_add("Run", serve, "docker run -p 8080:8080 -v ./repository:/opt/ml/model:ro millstream serve")
_add("Run", doctor, "millstream doctor", "millstream doctor devices", "millstream doctor --endpoint prod --json")
_add("Run", version, "millstream version", "millstream version --json")
_add(
    "Run",
    keys,
    "millstream keys create ci --scope infer:digits --rate 100 --json",
    "millstream keys list",
    "millstream keys rotate ci --grace 1h",
    "millstream keys revoke ci",
)
_add("Run", audit, "millstream audit", "millstream audit -n 100 --json")
_add(
    "Models", push, "millstream push resnet resnet18.onnx", "millstream push resnet new.onnx --version 7 --no-activate"
)
_add("Models", models, "millstream models", "millstream models --json")
_add("Models", describe, "millstream describe digits")
_add("Models", placement, "millstream placement", "millstream placement digits --watch", "millstream placement --json")
_add(
    "Models",
    configure,
    "millstream configure digits",
    "millstream configure digits --instances-min 1 --pin",
    "millstream configure digits --pools gpu,cpu --idle-s 300",
)
_add(
    "Models",
    race,
    "millstream race resnet",
    "millstream race resnet --samples images.npz --wait",
    "millstream race resnet --show --json",
)
_add("Models", compile_, "millstream compile undo resnet")
_add("Models", load, "millstream load resnet", """millstream load resnet --config '{"max_batch_size": 8}'""")
_add("Models", unload, "millstream unload resnet")
_add("Models", activate, "millstream activate resnet 7", "millstream activate resnet 6 --no-wait")
_add("Models", rm, "millstream rm resnet --version 7", "millstream rm resnet --force")
_add(
    "Use",
    predict,
    "millstream predict digits --example",
    "millstream predict digits --input examples/digits/request.json",
    "millstream predict churn --input customers.csv --output predictions.csv",
    'millstream predict sentiment --text "The first hour was pleasant."',
    "millstream predict sentiment < reviews.txt",
    "millstream predict resnet --input images.npy --output scores.npz",
    "echo '[[1, 2, 3]]' | millstream predict adder --json",
)
_add("Use", bench, "millstream bench digits", "millstream bench digits -c 64 -s 10 --rows 4")
_add(
    "Run",
    plan,
    "millstream plan --models 500 --workers 4 --memory 8GiB",
    "millstream plan --models 2000 --workers 8 --memory 4GiB --hours 24 --json",
    "millstream plan --models models.csv --trace calls.csv --workers 4 --memory 8GiB --compare",
    "millstream plan --models server --trace .millstream --pool gpu=1,memory=16GiB,speed=8 --pool cpu=2",
    "millstream plan --models server --trace calls.csv --memory 16GiB",
    "millstream plan --models .millstream/repository --trace calls.csv --json",
)
_add("Use", demo, "millstream demo", "millstream demo --connections 64 --json")


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with the command that the first argument names alone, since building all takes most of the time.

    Without such an argument, all commands count: for the help, for options before the command, for what is misspelt.
    """
    chosen = [command for command in app.registered_commands if command.name == (arguments or [""])[0]]
    if not chosen:
        return app
    reduced = copy.copy(app)
    reduced.registered_commands = chosen
    return reduced


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    prepare_streams()
    arguments = sys.argv[1:]
    try:
        code = app_for(arguments)(prog_name="millstream", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has read enough, as in `millstream logs | head`.
        failures.discard_output()
        sys.exit(failures.FAILED)
    except (Exception, KeyboardInterrupt) as error:
        report = failures.report_of(error)
        failures.show(report, arguments)
        if isinstance(error, OSError):
            failures.discard_output()  # perhaps of a full disk: what is left of it would fail again at the exit
        sys.exit(report.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
