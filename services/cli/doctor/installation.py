"""Checks of the installation that runs with this home, or that the settings name: who leads it, clocks of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.services.cli.doctor.machine import Check
from millstream.services.cli.doctor.redis import CLOCK_S_MAX, clock_check
from millstream.services.environment import client_variable
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from millstream.client.address import ServerAddress
    from millstream.client.client import Client
    from millstream.services.settings import Settings

#: Longest wait for the installation that is asked who leads it.
SERVER_S_MAX = 5.0


def server_checks(server: ServerAddress) -> list[Check]:
    """Return the checks of a server on any machine."""
    from millstream.client.client import Client
    from millstream.client.errors import ConnectionFailed

    try:
        with Client(server, retries=0, timeout=SERVER_S_MAX) as client:
            ready, about = client.ready(), f"{server.url} answers, with Millstream {client.server_version()}"
            state = Check("Server", "ok", about)
            if not ready:
                state = Check("Server", "fail", f"{about}, and is not ready", "`millstream logs` says more")
            return [state, *_governed(client)]
    except ConnectionFailed as failure:
        return [Check("Server", "fail", failure.message, "start it, or name another with --endpoint")]
    except Failure as failure:
        return [Check("Server", "fail", f"{server.url}: {failure.message}", "is it Millstream?")]


def _governed(client: Client) -> list[Check]:
    """Return the checks of what its admin API tells. Raises ConnectionFailed."""
    from millstream.client.errors import ConnectionFailed

    try:
        return [_controller(client.placement()["leader"]), *_clocks(client.workers())]
    except ConnectionFailed:
        raise
    except Failure as failure:
        return [Check("Controller", "warn", failure.message, "its admin API needs a key: MILLSTREAM_ADMIN_KEY, --key")]


def installation_checks(settings: Settings) -> list[Check]:
    """Return the checks of the installation in this home, or of the one that MILLSTREAM_ENDPOINT names, if any."""
    from millstream.client.address import find_server, url_of_home
    from millstream.client.client import Client
    from millstream.client.errors import ConnectionFailed

    endpoint = client_variable("MILLSTREAM_ENDPOINT")
    if not endpoint and url_of_home(settings.home) is None:
        return []
    try:
        with Client(find_server(None, None), retries=0, timeout=SERVER_S_MAX) as client:
            return _governed(client)
    except ConnectionFailed:
        if not endpoint:
            return []  # an installation that was killed left its address
        return [Check("Controller", "warn", f"no server answers at {endpoint}", "start it, or unset it")]
    except Failure as failure:
        return [Check("Controller", "warn", failure.message)]


def _controller(leader: Any) -> Check:
    if leader is not None:
        return Check("Controller", "ok", f"{leader['name']} leads, with token {leader['token']}")
    advice = "start `millstream up` without --no-controller, or python -m millstream.services.plugin controller"
    detail = "none leads: models are loaded at calls, and instances_min and idle_s have no effect"
    return Check("Controller", "warn", detail, advice)


def _clocks(workers: list[dict[str, Any]]) -> list[Check]:
    """Check the clock of each machine that has workers."""
    # Releases that do not publish it have no such member.
    ahead = {one["host"]: one["clock_ahead_s"] for one in workers if one.get("clock_ahead_s") is not None}
    names = {one["host"]: one["id"].rpartition("-")[0] for one in workers}
    wrong = {host: seconds for host, seconds in ahead.items() if abs(seconds) > CLOCK_S_MAX}
    if ahead and not wrong:
        return [clock_check("Worker clocks", "all machines with workers", 0)]
    return [clock_check("Worker clock", f"the machine of {names[host]}", seconds) for host, seconds in wrong.items()]
