"""Completes the names of models in a shell without importing more than the standard library's sockets.

words of the command line -> is a model's name expected? -> GET /v2/repository/index -> names, in the shell's form
Everything else is left to typer, which takes ten times longer to import; pathlib, typing and contextlib take 20 ms.
Without a server there are no names.
Source: typer's completion scripts for bash, zsh and fish (`millstream --show-completion`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # typing takes too long to import
if TYPE_CHECKING:
    import ssl

URL_DEFAULT = "http://127.0.0.1:8000"
#: A key press must not wait longer for a server that is busy or far away.
ANSWER_S_MAX = 0.5
REPLY_BYTES_MAX = 16 << 20

#: commands whose first argument is a model's name
MODEL_COMMANDS = frozenset(
    {
        *("activate", "bench", "configure", "describe", "load", "logs", "placement", "predict", "push", "race", "rm"),
        "unload",
    }
)
#: options of these commands that take a value; tests hold this to the commands themselves
VALUE_OPTIONS = frozenset(
    {
        "--agreement-min",
        "--capture-samples",
        "--config",
        "--connections",
        "--cosine-min",
        "--endpoint",
        "--home",
        "--idle-s",
        "--input",
        "--instances-max",
        "--instances-min",
        "--key",
        "--label",
        "--lines",
        "--markdown",
        "--metric",
        "--output",
        "--owner",
        "--pool",
        "--pools",
        "--race-seconds",
        "--reproduce",
        "--rows",
        "--samples",
        "--seconds",
        "--svg",
        "--targets",
        "--text",
        "--version",
        "-c",
        "-i",
        "-n",
        "-o",
        "-s",
        "-t",
    }
)


def complete_models() -> bool:
    """Answer a shell that asks for a model's name; return False to leave the question to typer."""
    environment = os.environ  # noqa: TID251 - how a shell asks for completions
    shell = environment["_MILLSTREAM_COMPLETE"].removeprefix("complete_")
    if shell not in {"bash", "zsh", "fish"}:
        return False
    line = read_line(environment, shell)
    if line is None or not expects_model(*line):
        return False
    words, incomplete = line
    names = model_names(words, environment)
    if "logs" in words:
        names = sorted({*names, *log_names(_value("--home", words) or _home(environment))})
    _answer(shell, [name for name in names if name.startswith(incomplete)], environment)
    return True


def read_line(environment: Mapping[str, str], shell: str) -> tuple[list[str], str] | None:
    """Return the command line that a shell passes in the environment, without the program's name.

    Its finished words, and the beginning of the next. None if it has quotes, which typer can read.
    """
    text = environment.get("COMP_WORDS" if shell == "bash" else "_TYPER_COMPLETE_ARGS", "")
    if any(quote in text for quote in "\"'\\"):
        return None
    words = text.split()
    if shell == "bash":
        position = environment.get("COMP_CWORD", "")
        if not position.isdecimal():
            return None
        return words[1 : int(position)], words[int(position)] if int(position) < len(words) else ""
    if len(words) > 1 and not text.endswith(" "):
        return words[1:-1], words[-1]
    return words[1:], ""


def expects_model(words: Sequence[str], incomplete: str) -> bool:
    """Return whether the next word of a command line is a model's name."""
    if incomplete.startswith("-"):
        return False
    arguments, option = [], ""
    for word in words:
        if option in VALUE_OPTIONS:
            option = ""
        elif word.startswith("-"):
            option = word
        else:
            arguments.append(word)
            option = ""
    return option not in VALUE_OPTIONS and len(arguments) == 1 and arguments[0] in MODEL_COMMANDS


def model_names(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the names of the server's models, sorted; empty if it does not answer in time, or not as expected."""
    try:
        models = json.loads(_request(_url(words, environment), environment))
        # A name with other characters would be read as code by zsh, which evaluates the answer.
        return sorted({name for model in models if isinstance(name := model["name"], str) and _is_plain(name)})
    except (OSError, ValueError, LookupError, TypeError):
        return []


def log_names(home: str) -> list[str]:
    """Return what `millstream logs` takes besides models: kinds of processes, and those that have a log."""
    try:
        files = os.listdir(os.path.join(home, "logs"))  # noqa: PTH118, PTH208
    except OSError:
        files = []
    logs = [name.removesuffix(".log") for name in files if name.endswith(".log")]
    return ["gateway", "worker", *(name for name in logs if _is_plain(name))]


def _home(environment: Mapping[str, str]) -> str:
    return environment.get("MILLSTREAM_HOME") or ".millstream"


def _is_plain(name: str) -> bool:
    return name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()


def _url(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the server to ask: the one that client/address.py finds, without its checks."""
    endpoint = _value("--endpoint", words) or environment.get("MILLSTREAM_ENDPOINT")
    if not endpoint:
        try:
            with open(os.path.join(_home(environment), "run", "url")) as file:  # noqa: PTH118
                endpoint = file.read().strip()
        except OSError:
            endpoint = None
    return endpoint if endpoint and "://" in endpoint else _configured_url(endpoint, environment)


def _configured_url(endpoint: str | None, environment: Mapping[str, str]) -> str:
    """Return the URL of an endpoint of the user's configuration; None: the default one."""
    folder = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", ""), ".config")  # noqa: PTH118
    path = os.path.join(folder, "millstream", "config.toml")  # noqa: PTH118
    if not endpoint and not os.path.exists(path):  # noqa: PTH110
        return URL_DEFAULT
    import tomllib

    with open(path, "rb") as file:
        document = tomllib.load(file)
    name = endpoint or document.get("default")
    return str(document["endpoints"][name]["url"]) if name else URL_DEFAULT


def _value(option: str, words: Sequence[str]) -> str | None:
    """Return the value of an option of the command line; None without one."""
    for index, word in enumerate(words):
        if word == option and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def _request(url: str, environment: Mapping[str, str]) -> bytes:
    """Return the server's list of models as JSON, which needs no key.

    HTTP/1.0, so that the end of the connection is that of the reply.
    """
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    address = authority.rpartition("@")[2]
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, ""
    secure = scheme == "https"
    connection = socket.create_connection((host.strip("[]"), int(port or (443 if secure else 80))), ANSWER_S_MAX)
    with connection:
        if secure:
            connection = _tls_context(url, environment).wrap_socket(connection, server_hostname=host.strip("[]"))
        lines = [f"POST {slash}{path.rstrip('/')}/v2/repository/index HTTP/1.0", f"Host: {address}"]
        lines += ["Content-Length: 2", "Accept-Encoding: identity", "", "{}"]
        connection.sendall("\r\n".join(lines).encode())
        reply, deadline = bytearray(), time.monotonic() + ANSWER_S_MAX
        while (chunk := connection.recv(1 << 16)) and len(reply) < REPLY_BYTES_MAX:
            reply += chunk
            if time.monotonic() > deadline:
                raise TimeoutError
    head, _, body = reply.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1] != b"200":
        raise ValueError(head)
    return bytes(body)


def _tls_context(url: str, environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return the TLS context for a URL that `_url` returned. Raises OSError if a certificate cannot be used."""
    from pathlib import Path

    from millstream.client.address import Trust, certificate_of_home, url_of_home
    from millstream.services.errors import Failure

    home = Path(_home(environment))
    pinned = certificate_of_home(home) if url == url_of_home(home) else None
    files = [environment.get(f"MILLSTREAM_{name}_FILE") for name in ("CA", "CLIENT_CERT", "CLIENT_KEY")]
    ca_file, certificate, key = (Path(file) if file else None for file in files)
    try:
        return Trust(None if pinned else ca_file, pinned, certificate, key).context()
    except Failure as failure:
        raise OSError(failure.message) from failure


def _answer(shell: str, names: list[str], environment: Mapping[str, str]) -> None:
    """Print completions as the shell's script of typer expects them."""
    if shell == "zsh":
        quoted = "\n".join(f'"{name}"' for name in names)
        print(f"_arguments '*: :(({quoted}))'" if names else "")
    elif shell == "fish" and environment.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        sys.exit(0 if names else 1)
    else:
        print("\n".join(names))
