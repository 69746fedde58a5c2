"""Runs the `millstream` command as a process of its own: with pipes, or in a terminal of a given width."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.services.environment import child_environment
from tests.kit import command_server

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
WAIT_S = 240


@dataclass
class Millstream:
    """Runs commands in a home of its own."""

    home: Path
    key: str | None = None

    def environment(self) -> dict[str, str]:
        environment = {"MILLSTREAM_HOME": str(self.home), "COLUMNS": "120", "NO_COLOR": "1"}
        return child_environment(environment | ({"MILLSTREAM_ADMIN_KEY": self.key} if self.key else {}))

    def run(self, *arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command and return the completed process."""
        return command_server.run(
            "millstream.services.cli",
            [*map(str, arguments)],
            cwd=ROOT,
            env=self.environment(),
            stdin=stdin or "",
            timeout_s=WAIT_S,
        )

    def ok(self, *arguments: object, stdin: str | None = None) -> str:
        """Return the standard output of a command that must succeed."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def in_terminal(self, arguments: Sequence[object], columns: int, *, keys: str = "") -> tuple[int, str]:
        """Run a command in a terminal as `in_terminal` does, with `keys` typed in it."""
        command = [sys.executable, "-m", "millstream.services.cli", *map(str, arguments)]
        return in_terminal(command, columns, self.environment(), keys=keys)

    def json(self, *arguments: object) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    def fails(self, *arguments: object, stdin: str | None = None, code: int = 1) -> str:
        """Return the one error line of a command that must end with `code`: 1 failed, 2 wrong usage."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == code, (done.stdout, done.stderr)
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr.removeprefix("error: ").strip()

    @contextlib.contextmanager
    def up(self, *options: object) -> Iterator[subprocess.Popen[str]]:
        """Run `up` during the block. Tests stop it with `end`; after a failed test it is killed here."""
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "millstream.services.cli",
                "up",
                "--http-port",
                "0",
                "--grpc-port",
                "0",
                *map(str, options),
            ],
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()


def until(process: subprocess.Popen[str], start: str) -> tuple[str, list[str]]:
    """Read lines up to one that begins with `start`; return the rest of that line, and the lines before it."""
    assert process.stdout is not None
    before: list[str] = []
    for line in process.stdout:
        if line.startswith(start):
            return line[len(start) :].strip(), before
        before.append(line.rstrip("\n"))
    assert process.stderr is not None
    raise AssertionError(f"no {start!r} in:\n" + "\n".join(before) + process.stderr.read())


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> int:
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    return process.returncode


def in_terminal(
    command: Sequence[str], columns: int, environment: Mapping[str, str] | None = None, *, keys: str = ""
) -> tuple[int, str]:
    """Run a program in a terminal; return its exit code and all that it wrote there, escape sequences included.

    `environment` overrides variables of ours; TERM is xterm-256color without it.
    """
    ours = child_environment({"TERM": "xterm-256color"} | dict(environment or {}), frozenset({"COLUMNS", "LINES"}))
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen(
        command, cwd=ROOT, env=ours, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        os.write(controller, keys.encode())
        written = b""
        try:
            while chunk := os.read(controller, 65536):
                written += chunk
        except OSError as error:
            if error.errno != errno.EIO:  # how the end of a terminal is told
                raise
        finally:
            os.close(controller)
        code = process.wait(WAIT_S)
    return code, written.decode().replace("\r\n", "\n")
