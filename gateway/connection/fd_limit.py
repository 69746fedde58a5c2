"""fd_limit: a gateway may have as many open files as connections that it takes, where the system lets it."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("millstream.gateway")

OTHERS = 256  # files, pipes and sockets that are no client's


def allow_connections(connections_max: int) -> None:
    """Raise the soft limit on open files, 1,024 in most shells, as far as is needed and the hard limit allows.

    Who has no descriptor left drops connections that it should refuse in words.
    """
    wanted = connections_max + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < wanted:
        log.warning(
            "%d connections may be open (MILLSTREAM_CONNECTIONS_MAX) but only %d files: raise the limit (ulimit -n %d)",
            connections_max,
            reached,
            wanted,
        )
