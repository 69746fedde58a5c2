"""Reads deploy/Dockerfile: the instructions of each stage, after those of the stage that it continues."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy/Dockerfile"


def read_stages() -> dict[str, list[list[str]]]:
    """Return the instructions of each stage, as words."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [shlex.split(line) if line.startswith("LABEL") else line.split() for line in text.splitlines() if line]
    stages: dict[str, list[list[str]]] = {}
    instructions: list[list[str]] = []  # the arguments before the first stage belong to none
    for line in lines:
        if line[0] == "FROM":
            instructions = [*stages.get(line[1], []), line]
            stages[line[3]] = instructions
        else:
            instructions.append(line)
    return stages


STAGES = read_stages()


def lock_of(target: str) -> str:
    """Return the name of the lock file whose packages an image holds."""
    source = next(line[1].removeprefix("--from=") for line in STAGES[target] if line[2:] == ["/opt/venv", "/opt/venv"])
    copied = [line[1] for line in STAGES[source] if line[0] == "COPY" and line[1].startswith("deploy/locks/")]
    assert len(copied) == 1
    return Path(copied[0]).stem


@dataclass(frozen=True, slots=True)
class Stage:
    """What a container of a target gets from its image."""

    copies: tuple[tuple[Path, str], ...]  # from this checkout -> path in the image
    environment: dict[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    user: str
    folder: str
    health: tuple[str, ...]
    owned: tuple[str, ...]  # folders that belong to the user of the image


def stage(target: str) -> Stage:
    """Return what the last instructions of each kind say."""
    lines = STAGES[target]
    variables = [word for line in lines if line[0] == "ENV" for word in line[1:]]
    run = [" ".join(line[1:]) for line in lines if line[0] == "RUN"]
    owned = [part.split()[6:] for text in run for part in text.split("&&") if part.strip().startswith("install -d -o")]
    health = _last("HEALTHCHECK", lines)
    return Stage(
        copies=tuple((ROOT / line[1], line[2]) for line in lines if line[0] == "COPY" and line[1][:2] != "--"),
        environment=dict(word.split("=", 1) for word in variables),
        entrypoint=_words(_last("ENTRYPOINT", lines)),
        command=_words(_last("CMD", lines)),
        user=_last("USER", lines),
        folder=_last("WORKDIR", lines),
        health=_words(health.partition(" CMD ")[2]),
        owned=tuple(folder for folders in owned for folder in folders),
    )


def _last(instruction: str, lines: list[list[str]]) -> str:
    found = [" ".join(line[1:]) for line in lines if line[0] == instruction]
    return found[-1] if found else ""


def _words(text: str) -> tuple[str, ...]:
    """Return the words of a command in its JSON form."""
    return tuple(json.loads(text)) if text else ()
