"""The environment of a function: what it declares, resolved at its upload, and built once for each lock.

PEP 723 in the file │ requirements.txt │ pyproject.toml, uv.lock ─> uv: the lock, which its version keeps
lock, interpreter ─> key ─> HOME/environments/KEY, shared by all that have the same; built where it is missing
uv installs wheels alone: nothing of a package runs while an environment is built. It runs in a process that may write
to that folder and to uv's cache alone. Without a declaration a function has the packages of the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from millstream.services.environment import library_environment, variables_of
from millstream.services.errors import Code, Failure, invalid
from millstream.services.sandbox.child import ChildProcess
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch

#: below the folder of a version
LOCK = "imported/requirements.txt"
ENVIRONMENTS = "environments"  # below the home
BUILD_LOG = "build.log"  # in an environment: what uv said
_BUILDER = "millstream.plugins.functions.package_installer"
_REQUIREMENTS, _PROJECT, _UV_LOCK, _WHEELS = "requirements.txt", "pyproject.toml", "uv.lock", "wheels"
_SCRIPT = re.compile(r"^# /// script[ \t]*\n(?P<content>(?:#(?: .*)?\n)+?)# ///[ \t]*$", re.MULTILINE)
#: a name with extras, versions and a marker: no paths and addresses, which would reach what only the server reaches
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\s*\[[A-Za-z0-9._, -]*\])?\s*([<>=!~][^;@#]*)?(;.*)?")
_HASH = re.compile(r"\s+--hash=sha256:[0-9a-f]{64}|\s*\\$|\s+#.*$")
_COMPLETE = "complete"  # in an environment that was built; its time is that of the last load with it
#: an environment that no version has any more is removed after this time without a load
UNUSED_S = 7 * 86_400.0
_BYTES_MAX, _MEMORY_BYTES_MAX = 20 << 30, 4 << 30
_DOCUMENT_BYTES_MAX = 4 << 20
_SHOWN_LINES = 6


def declared(path: Path) -> list[str]:
    """Return the requirements that PEP 723's block in a file declares. Raises Failure(INVALID)."""
    requirements = _script(path).get("dependencies", [])
    if not isinstance(requirements, list) or not all(isinstance(one, str) for one in requirements):
        raise invalid(f"{path.name}: 'dependencies' of the block '# /// script' are a list of texts")
    return requirements


def asks_network(path: Path) -> bool:
    """Return whether PEP 723's block in a file asks for the network. Raises Failure(INVALID)."""
    tool = _script(path).get("tool", {})
    asked = tool.get("millstream", {}) if isinstance(tool, dict) else {}
    found = asked.get("network", False) if isinstance(asked, dict) and asked.keys() <= {"network"} else None
    if not isinstance(found, bool):
        raise invalid(f"{path.name}: [tool.millstream] of the block '# /// script' has network = true, or nothing")
    return found


def _script(path: Path) -> dict[str, Any]:
    found = _SCRIPT.search(path.read_text(encoding="utf-8", errors="replace"))
    if found is None:
        return {}
    content = "".join(line[2:] if line.startswith("# ") else line[1:] for line in found["content"].splitlines(True))
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise invalid(f"{path.name}: the block '# /// script' is no TOML: {error}") from error


def check_requirements(lines: Iterable[str]) -> list[str]:
    """Return requirements without comments. Raises Failure(INVALID) for options, paths and addresses."""
    found = []
    for line in lines:
        text = _HASH.sub("", " " + line.partition(" #")[0].strip()).strip()
        if not text or text.startswith("#"):
            continue
        if not _REQUIREMENT.fullmatch(text):
            raise invalid(
                f"the requirement {text[:80]!r} is not served: a name with extras, versions and a marker is, from the "
                "index of the server, or from the folder 'wheels' beside the function"
            )
        found.append(text)
    return found


def lock(
    folder: Path,
    path: Path,
    home: Path,
    seconds_max: float,
    requirements: Sequence[str] | None = None,
    needed: Sequence[str] = (),
) -> str:
    """Resolve what a function declares into the file LOCK below `folder`, and return its name; "": nothing is declared.

    Args:
        folder: of the upload.
        path: of the function.
        home: of the installation.
        seconds_max: that resolving may take.
        requirements: in place of what is declared; none: there are none.
        needed: further requirements where some are declared, except in a uv.lock.

    Raises Failure(INVALID) with the end of what uv said.
    """
    target, beside = folder / LOCK, path.parent
    inline = declared(path) if requirements is None else requirements
    if requirements is not None and not requirements:
        return ""
    source = folder / "imported" / "requirements.in"
    source.parent.mkdir(exist_ok=True)
    source.write_text("".join(f"{one}\n" for one in (*check_requirements(inline), *needed)))
    if inline:
        arguments = ["pip", "compile"]
    elif (beside / _REQUIREMENTS).is_file():
        check_requirements(_lines(beside / _REQUIREMENTS))
        arguments = ["pip", "compile", str(beside / _REQUIREMENTS)]
    elif (beside / _PROJECT).is_file() and (beside / _UV_LOCK).is_file():
        arguments = ["export", "--frozen", "--no-emit-project", "--no-dev", "--project", str(beside)]
    elif (beside / _PROJECT).is_file():
        arguments = ["pip", "compile", str(beside / _PROJECT)]
    else:
        return ""
    if arguments[0] == "pip":
        arguments += [str(source)] if inline or needed else []
        arguments += ["--only-binary", ":all:", "--generate-hashes", "--no-header", "--no-annotate", *_index(beside)]
        arguments += ["--python", sys.executable]
    reads = (folder, beside)
    _run([*arguments, "--quiet", "--output-file", str(target)], home, reads, (target.parent,), seconds_max)
    check_requirements(_lines(target))
    return LOCK


def python_of(folder: Path, lock_name: str, wheels: Path, home: Path, seconds_max: float) -> str:
    """Return the interpreter of the environment of a lock, which is built if it is missing.

    Args:
        folder: of the version.
        lock_name: the lock below it; empty: the server's own environment.
        wheels: the folder that may have a folder of wheels.
        home: of the installation.
        seconds_max: that building may take.

    Raises Failure(INVALID) with the end of what uv said.
    """
    if not lock_name:
        return sys.executable
    locked = folder / lock_name
    environment = home / ENVIRONMENTS / key_of(locked.read_bytes())
    environment.parent.mkdir(parents=True, exist_ok=True)
    python = environment / "bin" / "python"
    with (environment.parent / f"{environment.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another load may build it
        if python.exists() and (environment / _COMPLETE).exists():
            (environment / _COMPLETE).touch()  # its last use
            return str(python)
        shutil.rmtree(environment, ignore_errors=True)
        reads, writes = (folder, wheels), (environment.parent,)
        _run(["venv", "--quiet", "--python", sys.executable, str(environment)], home, reads, writes, seconds_max)
        arguments = ["pip", "sync", "--python", str(python), "--only-binary", ":all:", "--require-hashes"]
        said = _run([*arguments, *_index(wheels), str(locked)], home, reads, writes, seconds_max)
        (environment / BUILD_LOG).write_bytes(said.replace(str(environment).encode(), environment.name.encode()))
        (environment / _COMPLETE).touch()
    remove_unused(home, time.time())  # noqa: TID251 - compared with times of files
    return str(python)


def remove_unused(home: Path, now_s: float) -> list[str]:
    """Remove environments that no version has, no process runs in, and none was loaded with for UNUSED_S; their names.

    Those that are being built are locked, and stay. `now_s`: since the epoch, as times of files.
    """
    folder = home / ENVIRONMENTS
    old = [one.parent for one in folder.glob(f"*/{_COMPLETE}") if one.stat().st_mtime < now_s - UNUSED_S]
    if not old:
        return []
    locks = [one for one in (home / "repository").rglob(Path(LOCK).name) if one.parent.name == Path(LOCK).parent.name]
    kept = {key_of(one.read_bytes()) for one in locks}
    removed = []
    for environment in old:
        with (folder / f"{environment.name}.lock").open("w") as held, suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if environment.name not in kept and not _runs(environment):
                (environment / _COMPLETE).unlink()
                shutil.rmtree(environment, ignore_errors=True)
                removed.append(environment.name)
    return removed


def _runs(environment: Path) -> bool:
    """Return whether a process of this machine was started with the interpreter of an environment."""
    begins = f"{environment}/".encode()
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if one.read_bytes().startswith(begins):
                return True
    return False


def python_of_text(lock_text: str, wheels: Path, home: Path, seconds_max: float) -> str:
    """Return what `python_of` returns, of the text of a lock; empty: the server's own environment."""
    if not lock_text:
        return sys.executable
    kept = home / ENVIRONMENTS / f"{key_of(lock_text.encode())}.txt"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if not kept.exists():
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(lock_text)
        made.replace(kept)
    return python_of(kept.parent, kept.name, wheels, home, seconds_max)


def key_of(content: bytes) -> str:
    """Return what identifies the environment of a lock, with this interpreter on this kind of machine."""
    machine = f"{sys.implementation.cache_tag} {sysconfig.get_platform()} {sys.base_prefix}"
    return hashlib.sha256(content + machine.encode()).hexdigest()[:20]


def _lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_DOCUMENT_BYTES_MAX).splitlines()


def _index(beside: Path) -> list[str]:
    """Return the options by which uv finds packages: a folder of wheels beside the function is all that it looks at."""
    wheels = beside / _WHEELS
    return ["--no-index", "--find-links", str(wheels)] if wheels.is_dir() else []


def _run(
    arguments: Sequence[str], home: Path, reads: Sequence[Path], writes: Sequence[Path], seconds_max: float
) -> bytes:
    """Run uv, confined, and return the end of what it said.

    Raises Failure: INVALID with that, UNSUPPORTED if it is not installed.
    """
    if find_spec("uv") is None:
        raise Failure(
            Code.UNSUPPORTED,
            "the function declares packages, and uv, which installs them, is missing: pip install "
            "'millstream[functions]' where the server runs",
        )
    cache = home / ENVIRONMENTS / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    variables = {**variables_of("UV_"), "UV_CACHE_DIR": str(cache), "UV_PYTHON_DOWNLOADS": "never", "HOME": str(cache)}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE"):
        variables |= variables_of(name)
    places = [",".join(map(str, (path.resolve() for path in paths))) for paths in (reads, (*writes, cache))]
    written = FolderWatch(writes[0], _BYTES_MAX, "")

    def watch_of(leader: int) -> GroupWatch:
        return GroupWatch(leader, written, _MEMORY_BYTES_MAX, alone=False)

    child = ChildProcess(
        _BUILDER, *places, *arguments, environment=library_environment(variables), watch_of=watch_of, folder=reads[0]
    )
    try:
        ended = child.run(b"", seconds_max)
    except TimeoutError:
        raise invalid(f"the function's packages could not be installed within {seconds_max:g} s") from None
    if ended.exceeded or ended.status:
        said = [line.strip() for line in ended.errors.decode(errors="replace").splitlines() if line.strip()]
        why = ended.exceeded or "; ".join(said[-_SHOWN_LINES:]) or f"uv ended with status {ended.status}"
        raise invalid(f"the function's packages cannot be installed: {why}")
    return ended.errors
