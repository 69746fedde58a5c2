"""The record of methods that a plug-in adds to the gRPC port: its contribution `grpc`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf.descriptor import ServiceDescriptor

from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.codec import parse_cost
from millstream.gateway.http.deps import Deps
from millstream.services.access.scopes import Row


class Method(NamedTuple):
    """A unary method.

    Args:
        call: (what `make` returned, request message, context) -> reply message. Raises Failure.
        access: what a call needs.
        fields: the fields of its request that are messages, as in parse_cost.within; None: its requests have few
            fields, and larger ones are refused.
    """

    call: Callable[[Any, Any, Any], Awaitable[Any]]
    access: Row
    fields: parse_cost.Fields | None = None


@dataclass(frozen=True, slots=True)
class GrpcService:
    """Methods of a service. Several plug-ins may add to one service.

    Args:
        descriptor: the service; reflection shows its file.
        make: returns the object whose functions `call` names, once in each gateway.
        methods: by name.
    """

    descriptor: ServiceDescriptor
    make: Callable[[Deps, Drain], Any]
    methods: Mapping[str, Method]

    def rows(self) -> dict[str, Row]:
        """Return what the methods need, by their full names."""
        return {f"/{self.descriptor.full_name}/{name}": method.access for name, method in self.methods.items()}
