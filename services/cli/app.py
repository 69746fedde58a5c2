"""The `millstream` command: registers the subcommands, and prints one line on standard error for a failure.

Command modules import large packages when they run, so that `millstream --help` does not wait for numpy.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable

import typer
from typer.exceptions import TyperException

from millstream.services.cli.commands.bench import bench
from millstream.services.cli.commands.demo import demo, version
from millstream.services.cli.commands.describe import describe
from millstream.services.cli.commands.doctor import doctor
from millstream.services.cli.commands.load import load, unload
from millstream.services.cli.commands.models import models, rm
from millstream.services.cli.commands.predict import predict
from millstream.services.cli.commands.push import push
from millstream.services.cli.commands.restart import restart
from millstream.services.cli.commands.serve import serve
from millstream.services.cli.commands.up import up
from millstream.services.cli.options import Endpoint, Key, Shared
from millstream.services.errors import Failure
from millstream.services.process.printable import printable

app = typer.Typer(
    name="millstream",
    help="Serve ONNX models over REST and gRPC, with dynamic batching, on your own machines.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="[bold]Start here[/]:  millstream up   then, in another terminal:  millstream demo",
)


@app.callback(invoke_without_command=True)
def shared(context: typer.Context, endpoint: Endpoint = None, key: Key = None) -> None:
    context.obj = Shared(endpoint, key)
    if context.invoked_subcommand is None:
        # `get_help` prints the help itself and returns an empty string.
        context.get_help()


def _add(panel: str, command: Callable[..., None], *examples: str) -> None:
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(
        rich_help_panel=panel,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog="\n".join(["[bold]Examples[/]", *(f"  {example}" for example in examples)]),
    )(command)


_add("Run", up, "millstream up", "millstream up --pool cpu=2 --gateways 2 --preload resnet=resnet18.onnx")
_add("Run", restart, "millstream restart", "millstream restart workers --json")
_add("Run", serve, "docker run -p 8080:8080 -v ./repository:/opt/ml/model:ro millstream serve")
_add("Run", doctor, "millstream doctor", "millstream doctor --json")
_add("Run", version, "millstream version", "millstream version --json")
_add(
    "Models", push, "millstream push resnet resnet18.onnx", "millstream push resnet new.onnx --version 7 --no-activate"
)
_add("Models", models, "millstream models", "millstream models --json")
_add("Models", describe, "millstream describe digits")
_add("Models", load, "millstream load resnet", """millstream load resnet --config '{"max_batch_size": 8}'""")
_add("Models", unload, "millstream unload resnet")
_add("Models", rm, "millstream rm resnet --version 7", "millstream rm resnet --yes")
_add(
    "Use",
    predict,
    "millstream predict digits --input examples/digits/request.json",
    "millstream predict resnet --input images.npy --output scores.npz",
    r"echo '\[\[1, 2, 3]]' | millstream predict adder --json",
)
_add("Use", bench, "millstream bench digits", "millstream bench digits -c 64 -s 10 --rows 4")
_add("Use", demo, "millstream demo", "millstream demo --connections 64 --json")


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except Failure as failure:
        _fail(failure.message)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        _fail(f"{error.format_message()}{hint}")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output closed the pipe; redirect stdout, so that the flush at exit does not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except Exception as error:
        _fail(f"unexpected {type(error).__name__}: {error}")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(printable(" ".join(message.split())), err=True)
    sys.exit(1)
