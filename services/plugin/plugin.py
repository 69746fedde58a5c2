"""plugin: the record by which a plug-in says what it adds. Pure: a record imports nothing of what it names.

entry point of the group `millstream.plugins` ─> PLUGIN = Plugin(…) ─> registry.contributions(kind, Type) ─> the core

A plug-in is a folder: `plugin.py` holds its record, and its other modules are imported when a process first uses what
they add. The type of each contribution is defined where the core uses it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of the command line.

    Args:
        name: the first word after `millstream`.
        panel: its section in `millstream --help`: "Run", "Models" or "Use".
        function: "module:function" of the command, imported when it is called.
        examples: shown at the end of its help.
    """

    name: str
    panel: str
    function: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plug-in adds. A text is "module:attribute", imported when a process first asks for that kind.

    Args:
        name: lower case, as in MILLSTREAM_PLUGINS.
        requires: modules of other distributions. A plug-in that lacks one is off, and `doctor` says what is missing.
        needs: names of plug-ins without which it is off.
        commands: of the command line.
        http: routes of a protocol (gateway/http/adapter.Adapter).
        gateway: builders of a part of each gateway (gateway/parts.py).
    """

    name: str
    requires: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    commands: tuple[Command, ...] = ()
    http: tuple[str, ...] = ()
    gateway: tuple[str, ...] = ()
