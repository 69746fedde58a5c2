"""Says why a command failed: one line on standard error, with --json also an object on standard output, and a code.

0 done, 1 failed, 2 wrong usage, 130 interrupted (Ctrl-C)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import typer
from typer.exceptions import TyperException

from millstream.client.cli.terminal import allows_colour
from millstream.client.errors import ServerError, WrongFile
from millstream.services.errors import Code, Failure
from millstream.services.nearest_names import did_you_mean
from millstream.services.process.printable import printable

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class UsageFailure(Failure):
    """A command line that is wrong: exit code 2. `message` names the option or argument."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID, message)


class Report(NamedTuple):
    """Why a command failed. `code` is for scripts; without a `message` nothing is shown.

    `details`: what the server said besides.
    """

    exit_code: int
    code: str
    message: str
    details: dict[str, Any] | None = None


def wrong_usage(message: str) -> UsageFailure:
    """Return the failure of a command line that is wrong: exit code 2."""
    return UsageFailure(message)


@contextlib.contextmanager
def usage_of() -> Iterator[None]:
    """Turn failures of the block because of invalid input into wrong usage.

    Not those that a server reports, nor a file that is no model: the exit code does not depend on who recognises it.
    """
    try:
        yield
    except Failure as failure:
        if failure.code is not Code.INVALID or isinstance(failure, ServerError | WrongFile):
            raise
        raise wrong_usage(failure.message) from failure


def report_of(error: BaseException) -> Report:
    """Return what to tell about an exception that ended a command."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return Report(INTERRUPTED, "interrupted", "")
    if isinstance(error, UsageFailure):
        return Report(USAGE, "usage", error.message)
    if isinstance(error, ServerError):
        details = {"status": error.status, "request_id": error.request_id, "retry_after_s": error.retry_after_s}
        known = {name: value for name, value in details.items() if value is not None}
        return Report(FAILED, error.code.value, error.message, known)
    if isinstance(error, Failure):
        return Report(FAILED, error.code.value, error.message)
    if isinstance(error, TyperException):
        return Report(USAGE, "usage", _typer_message(error))
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        return Report(FAILED, "system", f"{name}{error.strerror}")
    return Report(FAILED, "internal", f"unexpected {type(error).__name__}: {error}")


def show(report: Report, arguments: Sequence[str]) -> None:
    """Print a report; as JSON, too, if the command's arguments have --json. A stream that is closed gets nothing."""
    message = printable(" ".join(report.message.split()))
    if message:
        _write(sys.stderr, f"{_styled('error:', '1;31')} {message}\n")
    if message and wants_json(arguments):
        document = {"code": report.code, "message": message} | (report.details or {})
        _write(sys.stdout, json.dumps({"error": document}) + "\n")


def show_warning(message: str) -> None:
    """Print a warning: one line on standard error."""
    _write(sys.stderr, f"{_styled('warning:', '1;33')} {printable(message)}\n")


def _styled(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if allows_colour(sys.stderr) else text


def wants_json(arguments: Iterable[str]) -> bool:
    """Return whether --json is among the arguments, also of a command line that is otherwise wrong."""
    for argument in arguments:
        if argument == "--":
            return False
        if argument == "--json":
            return True
    return False


def discard_output() -> None:
    """Send standard output to nowhere after a write failed, so that the flush at exit does not fail, too."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(stream: Any, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        if stream is sys.stdout:
            discard_output()


def _typer_message(error: TyperException) -> str:
    """Return a message of typer in our form, with the nearest option for an unknown one, and where to read more."""
    context: Any = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if context is None:
        return error.format_message()
    message = error.format_message().rstrip(".").replace("Value error, ", "").replace("Input should be", "it must be")
    if type(error).__name__ == "NoSuchOption" and isinstance(option, str):
        message = f"there is no option {option}{_near_option(option, context)}"
    return f"{message[:1].lower()}{message[1:]} (see `{context.command_path} --help`)"


def _near_option(option: str, context: Any) -> str:
    def of(command: Any) -> list[str]:
        return [
            name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)
        ]

    own = [name for name in of(context.command) if name.startswith("-")]
    commands = getattr(context.command, "commands", {})
    if any(option in of(command) for command in commands.values()):
        return f": put it after the command, like `{context.command_path} COMMAND {option}`"
    return did_you_mean(option, own)
