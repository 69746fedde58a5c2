"""Writes tests/unit/public_surface.txt, what users can call, set and read: `python -m tests.kit.public_surface`.

docs/openapi.json is the same for the HTTP API.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import millstream
from millstream.gateway.grpc.handlers import services as grpc_services
from millstream.gateway.grpc.methods.service import described
from millstream.services.cli.app import full_app
from millstream.services.metrics.catalogue import CATALOGUE
from millstream.services.settings import SECRET_FILES, settings_class, variables

PATH = Path(__file__).parents[1] / "unit/public_surface.txt"


def surface() -> str:
    """Return the text: commands, settings, names of the Python package, metrics, gRPC services."""
    parts = {
        "Commands": commands(),
        "Settings": settings(),
        "Python": python(),
        "Metrics": metrics(),
        "gRPC": services(),
    }
    return "\n".join("\n".join([f"# {title}", *lines, ""]) for title, lines in parts.items())


def commands() -> Iterator[str]:
    """Yield each command with what its page of `--help` says, whatever its layout."""
    group: Any = typer.main.get_command(full_app())
    yield from _command("millstream", group)
    for name in sorted(group.commands):
        yield from _command(f"millstream {name}", group.commands[name])


def _command(name: str, command: Any) -> Iterator[str]:
    yield from ("", f"{name}: {' '.join((command.help or '').split())}")
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            metavar = (parameter.metavar or parameter.name.upper()).strip("[]")
            names = metavar if parameter.required else f"[{metavar}]"
        elif not parameter.is_flag:
            names = f"{names} {parameter.metavar}"
        default = "" if parameter.default in {None, ""} else f" [{parameter.default}]"
        yield f"  {names}{default}: {parameter.help}"


def settings() -> Iterator[str]:
    """Yield each variable with its type and default."""
    annotations: dict[str, str] = {}
    for one in reversed(settings_class().__mro__):
        annotations |= vars(one).get("__annotations__", {})
    for name, field in settings_class().model_fields.items():
        default = "unset" if field.default is None else f"'{field.default}'"
        yield f"{variables()[name]}: {annotations[name]} = {default}"
    yield from sorted(SECRET_FILES)


def python() -> Iterator[str]:
    """Yield the public names, and the methods of the clients."""
    for name in millstream.__all__:
        yield name
        value = getattr(millstream, name)
        if name in {"AsyncClient", "Client"}:
            methods = [method for method in vars(value).values() if inspect.isfunction(method)]
            public = [method for method in methods if not method.__name__.startswith("_")]
            for method in (value, *public):
                signature = str(inspect.signature(method)).replace("'", "")  # annotations are strings
                yield f"  {'async ' * inspect.iscoroutinefunction(method)}{method.__name__}{signature}"


def metrics() -> Iterator[str]:
    """Yield each metric with its labels."""
    for metric in sorted(CATALOGUE, key=lambda metric: metric.name):
        yield f"{metric.name} {metric.kind.name.lower()} {{{', '.join(metric.labels)}}}"


def services() -> Iterator[str]:
    """Yield the methods that gRPC reflection tells."""
    names, pool = described(grpc_services())
    for name in sorted(names):
        for method in pool.FindServiceByName(name).methods:
            sent, answered = (
                f"{'stream ' * streams}{message.full_name}"
                for streams, message in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            )
            yield f"{name}/{method.name}({sent}) returns ({answered})"


def main() -> None:
    PATH.write_text(surface(), encoding="utf-8")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    main()
