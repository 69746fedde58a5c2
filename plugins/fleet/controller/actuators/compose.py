"""The command that gives the services of a compose project the numbers of workers that are wanted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SERVICE_PREFIX = "worker-"  # the service of the pool cpu is worker-cpu


def compose_command(wanted: Mapping[str, int], options: Sequence[str] = ()) -> list[str]:
    """Return the command; empty if no pool is named. Running containers are left as they are.

    Args:
        wanted: workers by pool.
        options: of `docker compose`, like `--file x.yml`.
    """
    if not wanted:
        return []
    scales: list[str] = []
    for pool, workers in sorted(wanted.items()):
        scales += ["--scale", f"{SERVICE_PREFIX}{pool}={workers}"]
    services = [f"{SERVICE_PREFIX}{pool}" for pool in sorted(wanted)]
    return ["docker", "compose", *options, "up", "--detach", "--no-recreate", "--no-deps", *scales, *services]
