"""run_costs: charges the measured time of a run to the keys of its requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.scheduling.request import Request
from millstream.services.wire.batch import ReplyHeader


class RunCosts:
    """Charges runs. `on`: whether there are keys; else nothing is charged."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def charge(self, requests: Sequence[Request], header: ReplyHeader) -> None:
        """Charge each request of a batch its share of the run, by rows."""
        row_s = header.infer_s / max(1, header.run_rows)
        for request in requests:
            if request.key is not None:
                request.key.run_s.add(row_s * request.rows)
            if request.account is not None:
                request.account.add_compute(row_s * request.rows)
