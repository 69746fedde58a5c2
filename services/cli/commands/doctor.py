"""`millstream doctor`: checks that this machine meets Millstream's requirements, and says what to do otherwise."""

from __future__ import annotations

from enum import StrEnum
from types import FunctionType
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, asked_endpoint, load_settings
from millstream.client.cli.terminal import emit, escape, results, show_detail
from millstream.services.extras import missing_modules

if TYPE_CHECKING:
    from millstream.services.cli.doctor.machine import Check
    from millstream.services.settings import Settings

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


class Subject(StrEnum):
    """What `millstream doctor` looks at."""

    MACHINE = "machine"
    DEVICES = "devices"


What = Annotated[
    Subject, typer.Argument(help="`machine`: what Millstream requires. `devices`: what models can be compiled for.")
]


def doctor(
    context: typer.Context,
    what: What = Subject.MACHINE,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Check this machine: packages, devices, Redis, clock, memory, disk, limits, ports, certificate, and the sandbox.

    A Redis that answers is asked for its version, latency, memory limit and clock. If an installation runs with this
    home, or MILLSTREAM_ENDPOINT names one, says which controller leads it and whether clocks of workers are wrong. With
    --endpoint, that server is checked in place of this machine.

    Prints one line per check, and what to do about a problem. Exits with code 1 if a requirement is not met. Reads the
    settings from MILLSTREAM_… variables.

    `millstream doctor devices` shows processors and GPUs, which compile targets can use them, and
    what to install for the others.
    """
    elsewhere = asked_endpoint(context, endpoint, key)
    if what is Subject.DEVICES:
        if elsewhere:
            raise wrong_usage("--endpoint: `doctor devices` looks at this machine: call it on the server's")
        checks = device_checks()
    elif elsewhere:
        from millstream.services.cli.doctor.installation import server_checks

        checks = server_checks(elsewhere)
    else:
        checks = run_checks(load_settings())
    if json_output:
        emit({"checks": [check._asdict() for check in checks]})
    else:
        console, width = results(), max([14, *(len(check.name) for check in checks)])
        for check in checks:
            colour = _COLOURS[check.state]
            show_detail(console, f"{check.state:<4}  {check.name:<{width}} ", escape(check.detail), style=colour)
            if check.advice:
                show_detail(console, " " * (width + 7), f"[dim]{escape(check.advice)}[/]")
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


def run_checks(settings: Settings) -> list[Check]:
    """Return the results of all checks, in display order."""
    from millstream.services.cli.doctor.installation import installation_checks
    from millstream.services.cli.doctor.machine import machine_checks
    from millstream.services.cli.doctor.redis import redis_checks

    redis = [] if missing_modules("worker") else redis_checks(settings)
    return [*machine_checks(settings), *redis, *installation_checks(settings)]


def device_checks() -> list[Check]:
    """Return what plug-ins say of the devices of this machine."""
    from millstream.services.plugin.registry import contributions

    return [check for checks in contributions("devices", FunctionType) for check in checks()]
