"""Which server a command calls, with the user's configuration; and what it says about a port of another kind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from tests.kit.odd_servers import OddServer, answering, http, odd_server
from tests.kit.stack import Stack

MODELS = http(b'{"models": []}')


class User:
    """A user with a home folder of their own, and no running installation in the current folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config" / "millstream" / "config.toml"
        self.config.parent.mkdir(parents=True)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"XDG_CONFIG_HOME": str(self.folder / "config"), "NO_COLOR": "1", "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-m", "millstream.services.cli", *arguments],
            cwd=self.folder,
            env=child_environment(
                environment | variables, frozenset({"MILLSTREAM_ENDPOINT", "MILLSTREAM_HOME"} - variables.keys())
            ),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def fails(self, *arguments: str, code: int = 1, **variables: str) -> str:
        done = self.run(*arguments, **variables)
        assert done.returncode == code, done
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def write(self, text: str) -> None:
        self.config.write_text(text)
        self.config.chmod(0o600)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def test_a_named_endpoint_and_its_key(user):
    with odd_server(answering(MODELS)) as server, odd_server(answering(MODELS)) as other:
        user.write(
            f'default = "other"\n[endpoints.mine]\nurl = "{server.url}"\napi_key = "the-key"\n'
            f'[endpoints.other]\nurl = "{other.url}"\n'
        )
        for arguments, variables in (
            (["models", "--endpoint", "mine"], {}),
            (["--endpoint", "mine", "models"], {}),
            (["models"], {"MILLSTREAM_ENDPOINT": "mine"}),
        ):
            done = user.run(*arguments, **variables)
            assert (done.returncode, done.stderr) == (0, "")
            assert b"authorization: bearer the-key" in server.requests.pop().lower()
        assert user.run("models").returncode == 0
        assert b"authorization" not in other.requests.pop().lower()
        assert user.run("models", "--endpoint", other.url, "--key", "k").returncode == 0
        assert b"authorization: bearer k" in other.requests.pop().lower()
        user.config.chmod(0o644)
        done = user.run("models", "--endpoint", "mine", "--json")
        assert done.returncode == 0
        assert done.stderr == f"warning: other users may read the key in {user.config}: chmod 600 {user.config}\n"


def test_mistakes_in_the_configuration_are_one_line(user):
    user.write('defualt = "x"')
    assert f"{user.config}: there is no key 'defualt': did you mean 'default'?" in user.fails("models", code=2)
    user.write('[endpoints.prod]\nurl = "http://h"\n[endpoints.staging]\nurl = "http://h"\n')
    said = user.fails("models", "--endpoint", "stagign", code=2)
    assert "'stagign' is neither a URL" in said
    assert "did you mean 'staging'? valid: staging, prod" in said
    assert "MILLSTREAM_ENDPOINT 'x' is neither a URL" in user.fails("models", code=2, MILLSTREAM_ENDPOINT="x")


def test_ports_of_another_kind(user, stack: Stack):
    def plain(server: OddServer, connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(http(b"", "400 Bad Request"))

    with odd_server(answering(MODELS), tls=True) as server:
        assert "speaks TLS: write https:// instead of http://" in user.fails("models", "--endpoint", server.url)
        trusted = f"https://127.0.0.1:{server.port}"
        assert "is not trusted" in user.fails("models", "--endpoint", trusted)
    with odd_server(plain) as server:
        said = user.fails("models", "--endpoint", f"https://127.0.0.1:{server.port}")
        assert "speaks plain HTTP, not TLS: write http:// instead of https://" in said
    assert "no address is known for the host 'models.invalid'" in user.fails(
        "models", "--endpoint", "http://models.invalid"
    )
    said = user.fails("predict", "digits", "--input", "/dev/null", "--endpoint", f"http://{stack.grpc}")
    assert "is the gRPC port, which speaks HTTP/2 only; HTTP is usually on port 8000" in said


def test_commands_about_a_folder_act_on_the_endpoint_or_refuse(user, stack: Stack):
    home, other = str(stack.home), "http://127.0.0.1:1"
    for command in ("restart", "logs"):
        for arguments, variables in (
            (["--endpoint", other, command, "--home", home], {}),
            (["--endpoint", other, command], {"MILLSTREAM_HOME": home}),
            ([command], {"MILLSTREAM_HOME": home, "MILLSTREAM_ENDPOINT": other}),
        ):
            said = user.fails(*arguments, code=2, **variables)
            assert f"ENDPOINT {other}: `{command}` needs the server's own folder".lower() in said.lower()
    for name in ("127.0.0.1", "localhost"):
        mine = ["--endpoint", f"http://{name}:{stack.port}", "logs", "-n", "1"]
        assert user.run(*mine, MILLSTREAM_HOME=home).returncode == 0
    assert user.run("logs", "-n", "1", "--home", home, MILLSTREAM_ENDPOINT=other).returncode == 0
    for command in ("up", "version"):
        assert f"--endpoint: `{command}` calls no server" in user.fails("--endpoint", other, command, code=2)
    assert "--key: `up` calls no server" in user.fails("--key", "k", "up", code=2)


def test_doctor_checks_the_endpoint(user, stack: Stack):
    found = json.loads(user.run("--endpoint", f"http://127.0.0.1:{stack.port}", "doctor", "--json").stdout)
    assert [(one["name"], one["state"]) for one in found["checks"]] == [("Server", "ok"), ("Controller", "warn")]
    assert "a key" in found["checks"][1]["advice"]
    url = f"http://127.0.0.1:{stack.port}"
    found = json.loads(user.run("doctor", "--endpoint", url, "--json", MILLSTREAM_HOME=str(stack.home)).stdout)
    assert [one["name"] for one in found["checks"]] == ["Server", "Controller", "Worker clocks"]
    done = user.run("doctor", "--endpoint", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1" in done.stdout
    assert "looks at this machine" in user.fails("doctor", "devices", "--endpoint", url, code=2)


def test_a_user_without_a_home_folder(user):
    done = user.run("models", "--endpoint", "prod", HOME="/nowhere", XDG_CONFIG_HOME="")
    assert done.returncode == 2
    assert "it has no endpoints" in done.stderr
