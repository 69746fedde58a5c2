"""The side of the process that holds an instance: it confines itself, loads, and answers runs one after the other.

python -c BOOT PACKAGE MODULE DESCRIPTORS --parent PID
{"load": …} ─> begin, confine ─> load(task) ─> {"ready": …} or {"error": [kind, text]}
{"run": n, …} + tensors ─> run ─> {"run": n, …} + tensors, or {"run": n, "error": [kind, text]}
the other side closes the connection ─> finalize, if what runs has it
Standard library alone: it may run in an environment that has nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from millstream.plugins.children.message_channel import (
    STREAM_BYTES_MAX,
    Channel,
    ClosedError,
    Message,
    SharedFile,
)
from millstream.services.process.inheritance import close_all_but, die_with_parent
from millstream.services.sandbox.confine import Limits, confine

#: Makes `millstream` importable, and nothing that is installed beside it: the environment may be another one.
BOOT = (
    "import runpy, sys, types; package = sys.modules['millstream'] = types.ModuleType('millstream'); "
    "package.__path__ = [sys.argv[1]]; module = sys.argv[2]; del sys.argv[1:3]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
FILE_BYTES_MAX = 4 << 30  # of each file that it writes, the shared memory of its answers included
_ENDLESS_S = 1 << 40  # of processor time: a run has limits of its own
_TEXT_CHARACTERS_MAX = 1000
#: what libraries say of calls that the sandbox denies, and of names that therefore cannot be looked up
_OF_OUTSIDE = ("[Errno 1] Operation not permitted", "name resolution", "Name or service not known")
_OUTSIDE = ": what it calls is denied here, as functions have no network unless they ask, and start no other process"

#: kinds of errors: the caller's, the model's, no memory, the run was ended
INVALID, MODEL, MEMORY, TERMINATED = "invalid", "model", "memory", "terminated"


class InputError(Exception):
    """An input of a request is none that the model takes: the caller's mistake."""


class ModelError(Exception):
    """The model failed: a text that says how and where."""


class TerminatedError(BaseException):
    """The run is to end. No Exception, so that code which catches all of these lets it pass."""


class Serving:
    """What answers in another way than one answer to a run, one after the other (streamed.py)."""

    def serve(self, channel: Channel) -> NoReturn:
        """Serve until the other side closes the connection: raises ClosedError."""
        raise NotImplementedError


Run = Callable[[Message], Message]
#: loads, from the task; returns what it says of itself, and what runs
Load = Callable[[dict[str, Any]], tuple[dict[str, Any], Run | Serving]]


def main(load: Load) -> NoReturn:
    """Hold one instance until the other side closes the connection."""
    descriptors = [int(number) for number in sys.argv[1].split(",")]
    close_all_but(0, 1, 2, *descriptors)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[-1]))
    connection, received, sent = descriptors
    channel = Channel(connection, SharedFile(sent), SharedFile(received))
    run = None
    try:
        run = _loaded(channel, load)
        if isinstance(run, Serving):
            channel.inline_bytes_max = STREAM_BYTES_MAX
            run.serve(channel)
        while run is not None:
            _answer(channel, run)
    except ClosedError:
        finalize: Callable[[], None] | None = getattr(run, "finalize", None)
        if finalize is not None:
            with suppress(Exception):
                finalize()
    sys.stdout.flush()
    os._exit(0)  # skips what libraries do at their end, and threads of the model


def _loaded(channel: Channel, load: Load) -> Run | Serving | None:
    task = channel.receive().header["load"]
    try:
        _confine(task)
        said, run = load(task)
    except BaseException as error:
        channel.send({"error": described(error)})
        return None
    channel.send({"ready": said})
    return run


def _confine(task: dict[str, Any]) -> None:
    """Give up what the instance does not need. Raises OSError; PermissionError if nothing confines processes here."""
    limits = Limits(int(task["memory_bytes"]), _ENDLESS_S, FILE_BYTES_MAX, reserved_free=True)
    writes = [Path(folder) for folder in task["writes"]]
    reads = [Path(folder) for folder in task["reads"]]
    layers = confine(reads, writes, limits=limits, network=task["network"])
    if not (layers.stand or task["unconfined"]):
        raise PermissionError(
            "nothing on this machine confines code: `millstream doctor` says what is missing, and "
            "MILLSTREAM_UNCONFINED_IMPORTS=accept takes the risk"
        )


class _Interruptible:
    """While the block runs, SIGINT raises TerminatedError in it; at other times it does nothing."""

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, self._end)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @staticmethod
    def _end(_number: int, _frame: FrameType | None) -> None:
        raise TerminatedError


def _answer(channel: Channel, run: Run) -> None:
    message = channel.receive()
    header: dict[str, Any] = {"run": message.header["run"]}
    answer = Message(header)
    try:
        with _Interruptible():
            answer = run(message)
    except BaseException as error:
        header["error"] = described(error)
    try:
        channel.send(answer.header | header, answer.tensors, int(message.header["begin"]))
    except OSError as error:
        channel.send({**header, "error": [MEMORY, f"its answer finds no memory: {error.strerror}"]})


def described(error: BaseException) -> list[str]:
    """Return the kind and the text of an error."""
    if isinstance(error, TerminatedError):
        return [TERMINATED, "the run was terminated"]
    if isinstance(error, InputError):
        return [INVALID, str(error)[:_TEXT_CHARACTERS_MAX]]
    if isinstance(error, MemoryError):
        return [MEMORY, "out of memory"]
    text = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    return [MODEL, " ".join(text.split())[:_TEXT_CHARACTERS_MAX]]


@contextmanager
def located(folder: Path, prefix: str = "") -> Iterator[None]:
    """Raise what code of the user in `folder` raises in the block as a ModelError that names its line.

    `prefix`: of its text, before the type of what was raised.
    """
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{prefix}{error}") from error
    except (InputError, TerminatedError, MemoryError, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = next((one for one in reversed(frames) if Path(one.filename).is_relative_to(folder)), None)
        where = f" ({os.path.relpath(last.filename, folder)}, line {last.lineno})" if last is not None else ""
        if isinstance(error, SystemExit):
            raise ModelError(f"{prefix}it called exit({error.code!r}){where}") from error
        text = f": {error}" if str(error) else ""
        hint = _OUTSIDE if any(one in text for one in _OF_OUTSIDE) else ""
        raise ModelError(f"{prefix}{type(error).__name__}{text}{where}{hint}") from error
