"""fd_limit: bounds connections by the file descriptors that there are, and keeps a reserve for everything else.

Without a reserve, idle connections take the last descriptor, and keys and models can no longer be read.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("millstream.gateway")

#: files, pipes and sockets besides those of clients; half of the limit, if that is less
OTHER_FILES = 256
#: descriptors that a connection of the limit may take over HTTP: as many again are open while they are refused
HTTP_SHARE, GRPC_SHARE = 2, 1


def connections_within_limit(wanted: int, *, grpc: bool, handshakes: int) -> int:
    """Return how many connections each listener may have, at most `wanted`.

    Raises the soft limit on open files (1,024 in most shells) to what is needed, or to the hard limit.

    Args:
        wanted: the connections that the settings allow.
        grpc: whether there is a listener for gRPC.
        handshakes: connections that may be open besides, before their TLS handshake is complete.
    """
    shares = HTTP_SHARE + (GRPC_SHARE if grpc else 0)
    needed = wanted * shares + handshakes + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    if raised >= needed:
        return wanted
    free = raised - min(OTHER_FILES, raised // 2)
    fitting = max(1, (free - min(handshakes, free // 2)) // shares)
    log.warning(
        "%d connections may be open (MILLSTREAM_CLIENT_CONNECTIONS_MAX), but only %d files: %d are accepted over HTTP"
        "%s, and the rest of the files is kept for keys and models; raise the limit (ulimit -n %d)",
        wanted,
        raised,
        fitting,
        " and over gRPC each" if grpc else "",
        needed,
    )
    return fitting
