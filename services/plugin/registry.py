"""The plug-ins of this process, and what they add.

entry points of `millstream.plugins` ─┐
MILLSTREAM_PLUGINS ("all", "-compile")─┴─> plugins(): records, by name ─> contributions("http", Adapter): what they add

A checkout's own plug-ins are those of its pyproject.toml, so that a tree which is not installed has them, too; those of
other distributions are found by importlib.metadata. A plug-in that is on and cannot be imported stops the process: a
protocol that is silently missing is worse.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from millstream.services.environment import chosen_plugins
from millstream.services.errors import Code, Failure, invalid
from millstream.services.nearest_names import did_you_mean
from millstream.services.plugin.plugin import Backend, Format, Plugin

GROUP = "millstream.plugins"
_OWN = "millstream"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"  # in a checkout, whose folders are linked


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=_Named)


def plugins() -> tuple[Plugin, ...]:
    """Return the plug-ins that are on, by name.

    Raises:
        Failure: INVALID if MILLSTREAM_PLUGINS names a plug-in that is not installed, INTERNAL if one cannot be
            imported.
    """
    return _chosen(chosen_plugins())


def is_on(name: str) -> bool:
    """Return whether the plug-in of this name is on. Raises Failure as `plugins` does."""
    return any(plugin.name == name for plugin in plugins())


def contributions(kind: str, of: type[T]) -> list[T]:
    """Return what the plug-ins add of a kind, in the order of their names.

    Args:
        kind: a field of `Plugin`.
        of: the type of each contribution; a text in the record is imported.

    Raises:
        Failure: INTERNAL if one cannot be imported or is of another type.
    """
    return [_resolved(plugin.name, value, of) for plugin in plugins() for value in getattr(plugin, kind)]


def named(kind: str, of: type[N], own: Iterable[N] = ()) -> dict[str, N]:
    """Return what the core (`own`) and the plug-ins add of a kind, by name.

    Raises:
        Failure: INTERNAL as `contributions` does, and if two have the same name.
    """
    found: dict[str, N] = {}
    for one in (*own, *contributions(kind, of)):
        if one.name in found:
            raise Failure(
                Code.INTERNAL, f"two plug-ins add {one.name!r} to the {kind}: turn one off (MILLSTREAM_PLUGINS)"
            )
        found[one.name] = one
    return found


def missing_requirements() -> dict[str, list[str]]:
    """Return the plug-ins that are off because modules or other plug-ins are missing, with those names."""
    installed = _installed()
    missing = {name: _missing(plugin, installed) for name, plugin in installed.items()}
    return {name: modules for name, modules in missing.items() if modules}


def load(plugin: str, reference: str) -> Any:
    """Return what "module:attribute" names. Raises Failure(INTERNAL) that names the plug-in."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Failure:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
        raise Failure(
            Code.INTERNAL,
            f"plug-in {plugin} cannot be loaded ({reference}: {reason}): "
            f"mend or uninstall it, or set MILLSTREAM_PLUGINS=-{plugin}",
        ) from error


def load_for(record: Backend | Format, reference: str) -> Any:
    """Return what a record of a plug-in names. Raises Failure(INTERNAL) that names the plug-in."""
    owner = next((one.name for one in plugins() if record in one.backends or record in one.formats), _OWN)
    return load(owner, reference)


@cache
def _chosen(text: str) -> tuple[Plugin, ...]:
    installed = _installed()
    names = {name for name in _names(text, installed) if not _missing(installed[name], installed)}
    return tuple(
        plugin for name, plugin in sorted(installed.items()) if name in names and names.issuperset(plugin.needs)
    )


def _names(text: str, known: Iterable[str]) -> set[str]:
    """Return the plug-ins that MILLSTREAM_PLUGINS names: "all", "none", "a,b" or "-a,-b" (all but these)."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words in ([], ["all"]):
        return set(known)
    if words == ["none"]:
        return set()
    left_out = [word.startswith("-") for word in words]
    if any(left_out) and not all(left_out):
        raise invalid("MILLSTREAM_PLUGINS: write either names (openai,fleet), or what to leave out (-openai,-fleet)")
    named = [word.removeprefix("-") for word in words]
    for name in named:
        if name not in known:
            hint = did_you_mean(name, known)
            raise invalid(f"MILLSTREAM_PLUGINS: there is no plug-in {name!r}{hint} (known: {', '.join(sorted(known))})")
    return set(known) - set(named) if left_out[0] else set(named)


@cache
def _installed() -> dict[str, Plugin]:
    found: dict[str, Plugin] = {}
    for name, reference in _entry_points():
        plugin = load(name, reference)
        if not isinstance(plugin, Plugin) or plugin.name != name:
            raise Failure(Code.INTERNAL, f"plug-in {name} cannot be loaded: {reference} is no Plugin of that name")
        found[name] = plugin
    return found


def _entry_points() -> Iterator[tuple[str, str]]:
    own = _own_of_checkout()
    yield from (own or {}).items()
    for point in metadata.entry_points(group=GROUP):
        if own is None or point.dist is None or point.dist.name != _OWN:
            yield point.name, point.value


def _own_of_checkout() -> dict[str, str] | None:
    """Return the plug-ins that the pyproject.toml beside the sources names; None where Millstream is a wheel."""
    if not _PROJECT.is_file():
        return None
    project = tomllib.loads(_PROJECT.read_text()).get("project", {})
    return dict(project.get("entry-points", {}).get(GROUP, {})) if project.get("name") == _OWN else None


def _missing(plugin: Plugin, installed: Iterable[str]) -> list[str]:
    modules = [name for name in plugin.requires if not _is_importable(name)]
    return modules + [f"plug-in {name}" for name in plugin.needs if name not in installed]


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _resolved(plugin: str, value: object, of: type[T]) -> T:
    found = load(plugin, value) if isinstance(value, str) else value
    if not isinstance(found, of):
        raise Failure(Code.INTERNAL, f"plug-in {plugin} cannot be loaded: {value!r} is no {of.__name__}")
    return found
