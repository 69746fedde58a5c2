"""Exit codes and --json on failures, for every command: 1 failed, 2 wrong usage, 130 interrupted; never a traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import typer

from millstream.services.cli.app import full_app
from tests.kit.command_line import DIGITS, ROOT, WAIT_S, Millstream

GROUP: Any = typer.main.get_command(full_app())
COMMANDS: list[str] = sorted(GROUP.commands)
NO_SERVER = ["--endpoint", "http://127.0.0.1:1"]
DIGITS_ONNX = str(DIGITS / "digits.onnx")

#: a call of each command that fails although it is well formed; None: it has no way to fail here
FAILING: dict[str, list[str] | None] = {
    "activate": ["digits", "1", *NO_SERVER],
    "bench": ["digits", *NO_SERVER],
    "compile": ["undo", "digits", *NO_SERVER],
    "autoscale": NO_SERVER,
    "configure": ["digits", "--pin", *NO_SERVER],
    "demo": NO_SERVER,
    "describe": ["digits", *NO_SERVER],
    "doctor": None,
    "audit": NO_SERVER,
    "keys": ["list", *NO_SERVER],
    "load": ["digits", *NO_SERVER],
    "logs": ["--home", "/nowhere"],
    "models": NO_SERVER,
    "placement": NO_SERVER,
    "plan": None,
    "predict": ["digits", "-i", str(DIGITS / "request.json"), *NO_SERVER],
    "push": ["digits", DIGITS_ONNX, *NO_SERVER],
    "race": ["digits", *NO_SERVER],
    "restart": ["--home", "/nowhere"],
    "rm": ["digits", "--yes", *NO_SERVER],
    "serve": None,
    "top": NO_SERVER,
    "unload": ["digits", *NO_SERVER],
    "up": ["--redis", "unix:///nowhere.sock", "--http-port", "0", "--grpc-port", "-1"],
    "version": None,
}
#: a wrong call of each command, besides those with an unknown option
WRONG: dict[str, list[str]] = {
    "activate": ["digits", "latest"],
    "autoscale": ["grow"],
    "bench": ["digits", "--rows", "0"],
    "compile": ["redo", "digits"],
    "configure": ["digits", "--instances-min", "many"],
    "demo": ["--connections", "many"],
    "describe": [],
    "doctor": ["surplus"],
    "audit": ["-n", "0"],
    "keys": ["create", "ci"],
    "load": ["a/b"],
    "logs": ["-n", "-1"],
    "models": ["--endpoint", "nope"],
    "placement": ["a/b", "surplus"],
    "plan": ["--workers", "many"],
    "predict": ["digits", "-i", "/nowhere.npy"],
    "push": ["digits", "/nowhere.onnx"],
    "race": ["digits", "--samples", "/nowhere.npz"],
    "restart": ["redis"],
    "rm": ["digits"],
    "serve": ["/nowhere", "--http-port", "x"],
    "top": ["--sort", "colour"],
    "unload": [],
    "up": ["--pool", "cpu"],
    "version": ["surplus"],
}


@pytest.fixture(scope="module")
def millstream(tmp_path_factory):
    return Millstream(tmp_path_factory.mktemp("codes") / "home")


def test_the_tables_name_every_command():
    assert sorted(FAILING) == sorted(WRONG) == COMMANDS


def one_line(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text.removeprefix("error: ").strip()


def json_error(done: subprocess.CompletedProcess[str]) -> Any:
    document = json.loads(done.stdout)
    assert list(document) == ["error"]
    assert document["error"]["message"] == one_line(done.stderr)
    return document["error"]


@pytest.mark.parametrize("command", [command for command in COMMANDS if FAILING[command] is not None])
def test_a_command_that_fails_ends_with_1(millstream, command):
    arguments = [command, *(FAILING[command] or [])]
    done = millstream.run(*arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    one_line(done.stderr)
    done = millstream.run(*arguments, "--json")
    assert done.returncode == 1
    assert json_error(done)["code"] in {"unavailable", "not_found"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_call_ends_with_2(millstream, command):
    for arguments in (WRONG[command], ["--unknown-option"]):
        done = millstream.run(command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        one_line(done.stderr)
        done = millstream.run(command, *arguments, "--json")
        assert done.returncode == 2
        assert json_error(done)["code"] == "usage"


def started(arguments: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millstream.services.cli", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


@pytest.mark.parametrize("json_output", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ["models"],
        ["describe", "x"],
        ["push", "x", DIGITS_ONNX],
        ["predict", "x", "-i", str(DIGITS / "request.json")],
        ["load", "x"],
        ["rm", "x", "--force"],
        ["activate", "x", "1"],
        ["demo"],
        ["bench", "x"],
    ],
    ids=lambda command: command[0],
)
def test_ctrl_c_ends_with_130(tmp_path, command, json_output):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        arguments = [*command, "--endpoint", url, *(["--json"] if json_output else [])]
        with started(arguments, env=Millstream(tmp_path).environment()) as process:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1)  # it waits for the answer now
                process.send_signal(signal.SIGINT)
                stdout, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_ctrl_c_while_it_starts_ends_with_130(tmp_path):
    # The pipe tells when Python runs our code: with -X importtime each import is a line.
    environment = Millstream(tmp_path).environment() | {"PYTHONPROFILEIMPORTTIME": "1"}
    with started(["models"], env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "millstream.services.extras" in line:
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in stderr
    # It was faster than the signal: 1, or the signal came when the interpreter had ended, which a shell shows as 130.
    assert process.returncode in {130, 1, -signal.SIGINT}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["doctor"], ["doctor", "--json"], ["version", "--json"], ["describe", "--json"]]
)
def test_a_reader_that_has_gone_makes_no_traceback(millstream, arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, "-m", "millstream.services.cli", *arguments],
        cwd=ROOT,
        env=millstream.environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writer)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode in {1, 2}
    assert not re.search("Traceback|BrokenPipe|Exception ignored", stderr)


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "</dev/null >/dev/full"])
@pytest.mark.parametrize("arguments", ["version", "--help", "nope", "nope --json"])
def test_streams_that_are_closed_or_full(millstream, arguments, redirection):
    done = subprocess.run(
        f"{sys.executable} -m millstream.services.cli {arguments} {redirection}",
        shell=True,
        cwd=ROOT,
        env=millstream.environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    usage = arguments.startswith("nope")
    assert done.returncode == (2 if usage else 1 if "full" in redirection else 0), done.stderr


def test_text_that_the_terminal_cannot_encode(millstream):
    done = subprocess.run(
        [sys.executable, "-m", "millstream.services.cli", "nöpe", "--json"],
        cwd=ROOT,
        env=millstream.environment() | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert b"there is no command 'n\\xf6pe'" in done.stderr
    assert "nöpe" in json.loads(done.stdout)["error"]["message"]


def test_without_a_home_folder(tmp_path):
    environment = {name: value for name, value in Millstream(tmp_path).environment().items() if name != "HOME"}
    with started(["models", *NO_SERVER], env=environment) as process:
        _, stderr = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "is `millstream up` running?" in one_line(stderr)
