"""Responders for tests of the layers below the adapters."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Failure
from millstream.services.metrics.catalogue import RequestProtocol


class Discard:
    """Ignores every answer."""

    protocol = RequestProtocol.V2

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None: ...

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None: ...


DISCARD = Discard()
