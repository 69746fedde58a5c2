"""The private parts of uvicorn that the fast path overrides, calls or reads.

uvicorn promises none of them, so a gateway starts with the tested version alone, rather than fail in the middle of
requests. pyproject has the same bound.
"""

from __future__ import annotations

import uvicorn
from httptools import HttpRequestParser

from millstream.services.extras import misfit

TESTED = "0.54."  # the versions whose private parts the tests know

try:
    from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
except ImportError as error:
    raise misfit("uvicorn", uvicorn.__version__, [str(error)]) from error

__all__ = ["HIGH_WATER_LIMIT", "STATUS_LINE", "HttpToolsProtocol", "check_parts", "new_parser"]


def check_parts() -> None:
    """Raise Failure(INTERNAL) if this is not a tested version of uvicorn."""
    if not uvicorn.__version__.startswith(TESTED):
        raise misfit("uvicorn", uvicorn.__version__, ["the private parts of a tested version"])


def new_parser(connection: HttpToolsProtocol) -> HttpRequestParser:
    """Return a parser at the start of a request, like the one that uvicorn makes for a new connection."""
    parser = HttpRequestParser(connection)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
