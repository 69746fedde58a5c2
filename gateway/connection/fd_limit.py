"""fd_limit: raise the limit on open files to what the allowed number of connections needs."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("millstream.gateway")

OTHERS = 256  # files, pipes and sockets besides those of clients


def allow_connections(connections_max: int) -> None:
    """Raise the soft limit on open files, 1,024 in most shells, as far as needed and the hard limit allows.

    Without a free descriptor a gateway drops connections that it should answer with an error.
    """
    wanted = connections_max + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < wanted:
        log.warning(
            "%d connections may be open (MILLSTREAM_CLIENT_CONNECTIONS_MAX) but only %d files: raise the limit "
            "(ulimit -n %d)",
            connections_max,
            reached,
            wanted,
        )
