"""Reads docker-compose.yml as `docker compose config` resolves it, and says what an engine is told of each service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit.containers.dockerfile import ROOT
from tests.kit.containers.host import Container, Host, Mount
from tests.kit.containers.image import Image

COMPOSE = Path(sys.executable).parent / "docker-compose"


def resolved(*profiles: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the compose file as compose itself understands it, with these variables and no file .env."""
    options = [f"--profile={profile}" for profile in profiles]
    done = subprocess.run(
        [COMPOSE, "--env-file", "/dev/null", *options, "config", "--format", "json"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip(), done.stderr  # warnings of variables that are unset
    document: dict[str, Any] = json.loads(done.stdout, object_hook=_without_escapes)
    return document


def _without_escapes(found: dict[str, Any]) -> dict[str, Any]:
    """Undo what `config` does so that its output is a compose file again: `$` is written as `$$`."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("$$", "$")
        return [plain(item) for item in value] if isinstance(value, list) else value

    return {name: plain(value) for name, value in found.items()}


def container(host: Host, document: dict[str, Any], name: str, image: Image) -> Container:
    """Return what an engine is told of a service."""
    service = document["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    entrypoint = tuple(service["entrypoint"] or image.entrypoint)
    command = service["command"]
    if command is None:
        command = () if service["entrypoint"] else image.command
    user = service.get("user") or image.user
    mounts = [_mount(host, volume, user) for volume in service.get("volumes", [])]
    if (shm := _shared_memory(host, document, name)) is not None:
        mounts.append(Mount(shm, "/dev/shm"))
    check = service.get("healthcheck") or {}
    health = tuple(check["test"][1:]) if check.get("test") else image.health
    return Container(
        name=name,
        image=image,
        command=(*entrypoint, *command),
        environment={key: str(value) for key, value in (service.get("environment") or {}).items()},
        user=user,
        mounts=tuple(mounts),
        temporary=dict(entry.split(":", 1) for entry in service.get("tmpfs", [])),
        read_only=service.get("read_only", False),
        health=() if check.get("disable") else health,
    )


def _mount(host: Host, volume: dict[str, Any], user: str) -> Mount:
    source = Path(volume["source"]) if volume["type"] == "bind" else host.volume(volume["source"], user)
    return Mount(source, volume["target"], volume.get("read_only", False))


def _shared_memory(host: Host, document: dict[str, Any], name: str) -> Path | None:
    """Return the folder of /dev/shm of a service that shares its own, or joins another's."""
    mode = document["services"][name].get("ipc", "")
    if mode == "shareable":
        return host.shared_memory(name)
    found = re.fullmatch(r"service:(.*)", mode)
    return host.shared_memory(found[1]) if found else None
