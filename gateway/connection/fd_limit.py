"""fd_limit: raise the limit on open files to what the allowed number of connections needs."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("millstream.gateway")

OTHER_FILES = 256  # files, pipes and sockets besides those of clients


def allow_connections(connections_max: int) -> None:
    """Raise the soft limit on open files (1,024 in most shells) to what is needed, or to the hard limit.

    Without a free descriptor a gateway drops connections that it should answer with an error.
    """
    needed = connections_max + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised < needed:
        log.warning(
            "%d connections may be open (MILLSTREAM_CLIENT_CONNECTIONS_MAX) but only %d files: raise the limit "
            "(ulimit -n %d)",
            connections_max,
            raised,
            needed,
        )
