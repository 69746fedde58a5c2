"""Formats the pages of `--help` without frames: two columns on a wide terminal, one below the other on a narrow one.

typer's own pages cut the names of options on a terminal of 40 columns.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Sequence
from typing import Any

import typer.core

from millstream.services.cli.terminal import allows_colour, output_columns

#: Lines of prose are not longer than this on a wide terminal.
COLUMNS_MAX = 110
#: Narrower terminals show a description below its option.
TWO_COLUMNS_MIN = 72
NAMES_COLUMNS_MAX = 30
#: how alike the name of a suggested command or option is
ALIKE_MIN = 0.6


class HelpCommand(typer.core.TyperCommand):
    """A command with our help page; its `epilog` holds its examples, one a line."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_Page().of_command(self, ctx))


class HelpGroup(typer.core.TyperGroup):
    """The program, with our help page and the nearest command for a wrong one."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(_Page().of_group(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            hint = nearest(args[0], names) or f"; the commands are {', '.join(names)}"
            ctx.fail(f"there is no command {args[0][:64]!r}{hint}")
        return super().resolve_command(ctx, args)


def nearest(word: str, choices: Sequence[str]) -> str:
    """Return ": did you mean push?" with the nearest of the choices; empty if none is alike."""
    starts = [choice for choice in choices if len(word) > 1 and choice.startswith(word)]
    # Only the first characters: an argument may be as long as the system allows, and difflib is quadratic.
    near = difflib.get_close_matches(word[:64].lower(), choices, 1, ALIKE_MIN)
    found = starts if len(starts) == 1 else near
    return f": did you mean {found[0]}?" if found else ""


class _Page:
    """Collects the lines of a help page."""

    def __init__(self) -> None:
        self._columns = min(output_columns(), COLUMNS_MAX)
        self._colour = allows_colour()
        self._lines: list[str] = []

    def of_group(self, group: Any, context: Any) -> str:
        self._usage(context.command_path, "[OPTIONS] COMMAND …")
        self._prose(group.help or "")
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            first = (command.help or "").partition("\n")[0]
            panels.setdefault(command.rich_help_panel, []).append((name, first))
        width = self._names_width([row for rows in panels.values() for row in rows])
        for title, rows in panels.items():
            self._rows(title, rows, width)
        self._parameters(group, context)
        self._examples("Start here", group.epilog)
        return self._text()

    def of_command(self, command: Any, context: Any) -> str:
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        self._usage(context.command_path, " ".join(["[OPTIONS]", *map(_argument, arguments)]))
        self._prose(command.help or "")
        self._parameters(command, context)
        self._examples("Examples", command.epilog)
        return self._text()

    def _parameters(self, command: Any, context: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in command.get_params(context):
            if getattr(parameter, "hidden", False):
                continue
            argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if argument else "Options")
            names = _argument(parameter) if argument else _option(parameter)
            panels.setdefault(panel, []).append((names, _description(parameter)))
        width = self._names_width([row for rows in panels.values() for row in rows])
        for title, rows in panels.items():
            self._rows(title, rows, width)

    def _usage(self, program: str, pieces: str) -> None:
        prefix = "Usage: "
        lines = self._wrapped(f"{program} {pieces}", len(prefix))
        self._lines += [self._styled(prefix, "1") + lines[0], *(" " * len(prefix) + line for line in lines[1:])]

    def _prose(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            self._lines += ["", *self._wrapped(" ".join(paragraph.split()))]

    def _rows(self, title: str, rows: Sequence[tuple[str, str]], width: int) -> None:
        self._lines += ["", self._styled(title, "1")]
        for names, description in rows:
            styled = self._styled(names, "36")
            if self._columns < TWO_COLUMNS_MIN:
                self._lines += [f"  {styled}", *(f"      {line}" for line in self._wrapped(description, 6))]
                continue
            first, *rest = self._wrapped(description, width + 4) or [""]
            if len(names) > width:
                self._lines.append(f"  {styled}")
                rest.insert(0, first)
            else:
                self._lines.append(f"  {styled}{' ' * (width - len(names))}  {first}".rstrip())
            self._lines += [" " * (width + 4) + line for line in rest]

    def _examples(self, title: str, lines: str | None) -> None:
        if lines:
            # Never wrapped: a line is copied as it is.
            self._lines += ["", self._styled(title, "1"), *(f"  {line}" for line in lines.splitlines())]

    def _names_width(self, rows: Sequence[tuple[str, str]]) -> int:
        return max((len(names) for names, _ in rows if len(names) <= NAMES_COLUMNS_MAX), default=0)

    def _wrapped(self, text: str, indent: int = 0) -> list[str]:
        width = max(self._columns - indent, 20)
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _styled(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def _text(self) -> str:
        return "\n".join([*self._lines, ""])


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]{}")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    """Return an option's names and its value, like "-n, --lines N" and "--wait / --no-wait"."""
    names = sorted(parameter.opts, key=len)
    text = ", ".join(names) + "".join(f" / {name}" for name in parameter.secondary_opts)
    return text if parameter.is_flag or not parameter.metavar else f"{text} {parameter.metavar}"


def _description(parameter: Any) -> str:
    """Return what a parameter does, with its default if it has a plain one that the text does not name."""
    text = parameter.help or ""
    default = parameter.default
    shown = parameter.show_default
    if isinstance(shown, str):
        return f"{text} Default: {shown}."
    if isinstance(default, bool) and parameter.secondary_opts:
        return f"{text} Default: {(parameter.opts if default else parameter.secondary_opts)[0]}."
    if (
        isinstance(default, int | float | str)
        and not isinstance(default, bool)
        and shown is not False
        and default != ""
    ):
        return f"{text} Default: {default}."
    return text
