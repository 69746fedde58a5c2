"""A row of the authorisation table: what an HTTP route or a gRPC method needs. Pure.

A row is beside its route or method, in an Adapter (gateway/http/adapter.py) or in a GrpcService
(gateway/grpc/methods/service.py). A route without a row is refused; no method is without one.
tests/unit/access/test_access_table.py walks all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from millstream.services.access.scopes import Need


class Row(NamedTuple):
    """What a call needs.

    Args:
        need: the need.
        model: the path parameter, or the field of the gRPC message (`a.b`: b of a), that names the model; None: the
            call names none there. Calls that run a model check its name again when they find it.
        changes: whether the call changes something, so that the audit log has it.
        admin: whether it is one of the admin API, which is never open.
        of_message: returns what a gRPC message needs, where that depends on its fields.
    """

    need: Need
    model: str | None = None
    changes: bool = False
    admin: bool = False
    of_message: Callable[[Any], Need] | None = None

    @property
    def controls(self) -> bool:
        """Whether it changes the server or touches its memory: open without keys only where a setting says so."""
        return self.changes or self.need is Need.MEMORY

    @property
    def keyless(self) -> bool:
        """Whether anybody may make the call while no key exists."""
        return not (self.admin or self.controls)

    def for_message(self, message: Any) -> Row:
        """Return the row of a call whose gRPC message has been read."""
        if self.of_message is None:
            return self
        need = self.of_message(message)
        return self._replace(need=need, changes=need in {Need.WRITE, Need.ADMIN}, of_message=None)


#: what calls of routes need, by method and template of the path
Rows = Mapping[tuple[str, str], Row]
#: of a list of models, which shows those that the caller may describe
LIST = Row(Need.DESCRIBE)
