"""The `millstream` command: registers the subcommands, and prints one line on standard error for a failure.

The module of a command is imported when its help is shown or it runs; it imports large packages when it runs, so that
`millstream --help` does not wait for numpy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from millstream.client.cli import failures
from millstream.client.cli.demo import version_text
from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Key, Shared
from millstream.client.cli.terminal import prepare_streams
from millstream.services.nearest_names import did_you_mean
from millstream.services.plugin.plugin import Command
from millstream.services.plugin.registry import contributions, load

#: sections of the help, in this order
_PANELS = ("Run", "Models", "Use")
#: lines of the help are not longer on a wide terminal
_COLUMNS_MAX = 110
_CALL_NO_SERVER = frozenset({"serve", "up", "version"})


class _Command(typer.core.TyperCommand):
    """A command whose `epilog` holds its examples, one a line: they are shown as they are, to be copied."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples("Examples", self.epilog, formatter)


class _Program(typer.core.TyperGroup):
    """The program: its help has the commands in sections, with whole sentences."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0][:64]!r}{did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel in _PANELS:
            with formatter.section(panel):
                formatter.write_dl(
                    [
                        (name, (command.help or "").partition("\n")[0])
                        for name, command in self.commands.items()
                        if getattr(command, "rich_help_panel", None) == panel
                    ]
                )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples("Start here", self.epilog, formatter)


def _write_examples(title: str, lines: str | None, formatter: Any) -> None:
    with formatter.section(title):
        formatter.write("".join(f"  {line}\n" for line in (lines or "").splitlines()))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"millstream {version_text()}")
        raise typer.Exit


ShowVersion = Annotated[
    bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Print the version and exit.")
]


def _shared(
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


COMMANDS = (
    Command(
        name="up",
        panel="Run",
        function="millstream.services.cli.commands.up:up",
        examples=(
            "millstream up",
            "millstream up --pool cpu=2 --gateways 2 --preload resnet=resnet18.onnx",
            "millstream up --memory 8GiB",
            "millstream up --pool cpu=1:4",
            "millstream up --pool gpu=1,memory=16GiB --pool cpu=2,threads=4,memory=8GiB",
        ),
    ),
    Command(
        name="restart",
        panel="Run",
        function="millstream.services.cli.commands.restart:restart",
        examples=(
            "millstream restart",
            "millstream restart workers --json",
        ),
    ),
    Command(
        name="logs",
        panel="Run",
        function="millstream.services.cli.commands.logs:logs",
        examples=(
            "millstream logs -f",
            "millstream logs gateway -n 20",
            "millstream logs -f worker --json",
        ),
    ),
    Command(
        name="serve",
        panel="Run",
        function="millstream.services.cli.commands.serve:serve",
        examples=("docker run -p 8080:8080 -v ./repository:/opt/ml/model:ro millstream serve",),
    ),
    Command(
        name="doctor",
        panel="Run",
        function="millstream.services.cli.commands.doctor:doctor",
        examples=(
            "millstream doctor",
            "millstream doctor devices",
            "millstream doctor --endpoint prod --json",
        ),
    ),
    Command(
        name="version",
        panel="Run",
        function="millstream.client.cli.demo:version",
        examples=(
            "millstream version",
            "millstream version --json",
        ),
    ),
    Command(
        name="keys",
        panel="Run",
        function="millstream.client.cli.keys:keys",
        examples=(
            "millstream keys create ci --scope infer:digits --rate 100 --json",
            "millstream keys list",
            "millstream keys rotate ci --grace 1h",
            "millstream keys revoke ci",
        ),
    ),
    Command(
        name="audit",
        panel="Run",
        function="millstream.client.cli.keys:audit",
        examples=(
            "millstream audit",
            "millstream audit -n 100 --json",
        ),
    ),
    Command(
        name="push",
        panel="Models",
        function="millstream.client.cli.push:push",
        examples=(
            "millstream push resnet resnet18.onnx",
            "millstream push resnet new.onnx --version 7 --no-activate",
        ),
    ),
    Command(
        name="models",
        panel="Models",
        function="millstream.client.cli.models:models",
        examples=(
            "millstream models",
            "millstream models --json",
        ),
    ),
    Command(
        name="describe",
        panel="Models",
        function="millstream.client.cli.describe:describe",
        examples=("millstream describe digits",),
    ),
    Command(
        name="placement",
        panel="Models",
        function="millstream.client.cli.placement:placement",
        examples=(
            "millstream placement",
            "millstream placement digits --watch",
            "millstream placement --json",
        ),
    ),
    Command(
        name="configure",
        panel="Models",
        function="millstream.client.cli.configure:configure",
        examples=(
            "millstream configure digits",
            "millstream configure digits --instances-min 1 --pin",
            "millstream configure digits --pools gpu,cpu --idle-s 300",
        ),
    ),
    Command(
        name="load",
        panel="Models",
        function="millstream.client.cli.models:load",
        examples=(
            "millstream load resnet",
            "millstream load resnet --config '{\"max_batch_size\": 8}'",
        ),
    ),
    Command(
        name="unload",
        panel="Models",
        function="millstream.client.cli.models:unload",
        examples=("millstream unload resnet",),
    ),
    Command(
        name="activate",
        panel="Models",
        function="millstream.client.cli.models:activate",
        examples=(
            "millstream activate resnet 7",
            "millstream activate resnet 6 --no-wait",
        ),
    ),
    Command(
        name="rm",
        panel="Models",
        function="millstream.client.cli.models:rm",
        examples=(
            "millstream rm resnet --version 7",
            "millstream rm resnet --force",
        ),
    ),
    Command(
        name="predict",
        panel="Use",
        function="millstream.client.cli.predict:predict",
        examples=(
            "millstream predict digits --example",
            "millstream predict digits --input examples/digits/request.json",
            "millstream predict churn --input customers.csv --output predictions.csv",
            'millstream predict sentiment --text "The first hour was pleasant."',
            "millstream predict sentiment < reviews.txt",
            "millstream predict resnet --input images.npy --output scores.npz",
            "echo '[[1, 2, 3]]' | millstream predict adder --json",
        ),
    ),
    Command(
        name="bench",
        panel="Use",
        function="millstream.client.cli.bench:bench",
        examples=(
            "millstream bench digits",
            "millstream bench digits -c 64 -s 10 --rows 4",
        ),
    ),
    Command(
        name="demo",
        panel="Use",
        function="millstream.client.cli.demo:demo",
        examples=(
            "millstream demo",
            "millstream demo --connections 64 --json",
        ),
    ),
)


def full_app() -> typer.Typer:
    """Return the program with the commands of the core and of all plug-ins that are on."""
    return _app_of((*COMMANDS, *contributions("commands", Command)))


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the app with the command that the first argument names alone, since building all takes most of the time.

    Without such an argument, all commands count: for the help, for options before the command, for what is misspelt.
    """
    name = (arguments or [""])[0]
    own = [command for command in COMMANDS if command.name == name]
    if own or name.startswith("-"):
        return _app_of(own) if own else full_app()
    chosen = [command for command in contributions("commands", Command) if command.name == name]
    return _app_of(chosen) if chosen else full_app()


def _app_of(commands: Sequence[Command]) -> typer.Typer:
    app = typer.Typer(
        name="millstream",
        cls=_Program,
        help="Serve ONNX models over REST and gRPC, with dynamic batching, on your own machines.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": _COLUMNS_MAX},
        epilog="millstream up\nmillstream demo   # in another terminal",
    )
    app.callback(invoke_without_command=True)(_shared)
    for command in sorted(commands, key=lambda command: _PANELS.index(command.panel)):
        _add(app, command)
    return app


def _add(app: typer.Typer, command: Command) -> None:
    function = load("millstream", command.function)
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    app.command(
        command.name,
        cls=_Command,
        rich_help_panel=command.panel,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog="\n".join(command.examples),
    )(function)


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
