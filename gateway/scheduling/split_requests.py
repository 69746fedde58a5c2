"""Requests with more rows than a run takes: their parts wait and run as requests do, and their outputs are joined.

request ─> a window of parts ─> the lane ……… outputs of a part ─> copied to its rows ─> next part, or the answer
a part fails, the deadline passes, the caller goes ─> the request ends, and its other parts are dropped

The request has one permit, deadline, account and answer. Its parts stay with its version and move between pools as
other requests do. A part is ordered among the waiting requests as one that arrives when it enters the lane. So a large
request takes turns with others, like a client that sends its parts one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.observing.observer import guarded
from millstream.gateway.scheduling.admission import LaneAdmission
from millstream.gateway.scheduling.batching.dispatch import DEPTH
from millstream.gateway.scheduling.dispatcher import Dispatcher
from millstream.gateway.scheduling.lane_state import LaneState
from millstream.gateway.scheduling.request import LATE, Part, Request, RequestLane
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.gateway.tensors.row_parts import InputRows, JoinedOutputs
from millstream.services.errors import Code, Failure, invalid
from millstream.services.metrics.inference import Reason
from millstream.services.wire.batch import ReplyHeader, too_large

_OF_ROWS = frozenset({Code.INVALID, Code.MODEL})  # failures whose messages may name a row, which is one of the part


class SplitRequest:
    """A request while its parts wait and run: the responder of its parts.

    `whole`: the request. `splits`: of its lane, which takes the next parts. `parts`: those that wait or are in flight.
    `next_row`: first row of the next part.
    """

    def __init__(self, whole: Request, splits: Splits) -> None:
        self.whole = whole
        self.splits = splits
        self.protocol = whole.responder.protocol
        self.parts: set[Part] = set()
        self.next_row = 0
        self._inputs = InputRows(splits.lane.manifest.signature.inputs, whole.inputs, whole.rows)
        self._outputs = JoinedOutputs(whole.rows)
        self._outputs_bytes = 0
        self._rows_joined = 0
        self._since_run_s = self._input_s = self._infer_s = self._output_s = 0.0  # sums over the parts

    @property
    def rows_left(self) -> int:
        """The rows of the parts that did not enter the lane yet."""
        return self._inputs.left

    def next_parts(self, count: int, rows: int, now: float) -> list[Part]:
        """Return the next parts of `rows` rows each, at most `count`; the last one of the request may have fewer."""
        parts: list[Part] = []
        while self.rows_left and len(parts) < count:
            part_rows = min(rows, self.rows_left)
            parts.append(Part(self, self._inputs.take(part_rows), part_rows, now))
            self.next_row += part_rows
        return parts

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Take the outputs of parts that ran in one batch."""
        for part, reply in zip(requests, outputs.replies([part.rows for part in requests]), strict=True):
            self.answer_one(part, reply)

    def answer_one(self, request: Request, reply: Reply) -> None:
        """Take the outputs of a part: the next one enters the lane, or the request is answered."""
        assert isinstance(request, Part)
        if self.whole.done:
            return
        self.parts.discard(request)
        try:
            self._join(request, reply)
        except Failure as failure:
            self.fail(request, failure)
        except Exception as error:  # no memory, for example
            self.fail(request, internal_failure("the outputs of a request could not be joined", error))
        else:
            if self.rows_left:
                self.splits.fill(self)
            elif not self.parts:
                self._answer(request)

    def _join(self, part: Part, reply: Reply) -> None:
        """Copy the outputs of a part. Raises Failure if they cannot be joined, or are too large together."""
        splits = self.splits
        more_bytes = self._outputs.more_bytes(reply)
        self._outputs_bytes += more_bytes
        splits.admit_outputs(self.whole, more_bytes, self._outputs_bytes)
        differs = self._outputs.add(part.first_row, reply)
        if differs is not None:
            spec = self.splits.lane.manifest.answered.outputs[differs]
            raise invalid(
                f"output '{spec.name}' has the shape {list(reply[differs].shape)}, and other dimensions for other rows "
                "of the request, which ran in parts: these outputs cannot be joined; send at most "
                f"{splits.rows_max} rows in a request"
            )
        self._rows_joined += part.rows
        header, put_at, replied_at = part.ran
        self._since_run_s += replied_at - put_at - header.queue_s
        self._input_s += header.input_s
        self._infer_s += header.infer_s
        self._output_s += header.output_s
        self.whole.timing = part.timing
        self.whole.form = part.form or self.whole.form

    def _answer(self, last: Part) -> None:
        whole, splits = self.whole, self.splits
        reply = self._outputs.reply()
        header, put_at, now = last.ran
        splits.trace(whole, reply, header, put_at, now)
        self._close()
        sums = msgspec.structs.replace(
            header, queue_s=0.0, input_s=self._input_s, infer_s=self._infer_s, output_s=self._output_s
        )
        splits.answers.answer_split(whole, reply, sums, self._since_run_s, now)

    def fail(self, request: Request, failure: Failure, reason: Reason | None = None) -> None:
        """Fail the request, because a part of it failed. `reason`: as in Answers.fail."""
        if isinstance(request, Part) and failure.code in _OF_ROWS:
            last = request.first_row + request.rows - 1
            failure = Failure(failure.code, f"in rows {request.first_row} to {last}: {failure.message}")
        self.splits.answers.fail((self.whole,), failure, reason)
        self.splits.lane.rows_done -= self._rows_joined  # they were counted as answered
        self._close()

    def cancel(self) -> None:
        """Drop the request: its caller went away."""
        self.splits.answers.cancel(self.whole)
        self.splits.lane.rows_done -= self._rows_joined
        self._close()

    def _close(self) -> None:
        """Drop the parts that have no answer: those in flight still run, but their outputs are not used."""
        parts, self.parts = self.parts, set()
        for part in parts:
            if not part.done:
                part.lane.cancel(part)
        self.splits.open.discard(self)
        self.whole.split = None  # else the two keep each other, and the tensors
        self.whole.inputs = ()


class Splits:
    """The requests of one lane that run in parts. `open`: those that have no answer yet.

    `rows_max`: rows of the largest run; requests with more are split.
    """

    def __init__(self, lane: LaneState, admission: LaneAdmission, dispatcher: Dispatcher, rows_max: int) -> None:
        self.open: set[SplitRequest] = set()
        self.rows_max = rows_max
        self.batching_off = False
        self.lane = lane
        self.answers = dispatcher.answers
        self._admission = admission
        self._dispatcher = dispatcher

    @property
    def rows(self) -> int:
        """Rows of the parts that did not enter the lane yet."""
        return sum([split.rows_left for split in self.open]) if self.open else 0

    def requests_waiting(self) -> tuple[int, int]:
        """Return how many requests wait with some of their rows, and how many of their parts wait in the lane."""
        waiting = [(split.rows_left, sum([not part.taken for part in split.parts])) for split in self.open]
        return sum([bool(rows or parts) for rows, parts in waiting]), sum([parts for _, parts in waiting])

    def rows_ahead(self, request: Request) -> int:
        """Return the rows outside of the lane that run before a new request is answered, its own included.

        Of each other request as many as it has, since all take turns.
        """
        return request.rows + sum([min(split.rows_left, request.rows) for split in self.open])

    def check(self, request: Request) -> None:
        """Raise Failure if a request cannot run in parts: INVALID, TOO_LARGE."""
        if self.batching_off:
            raise invalid(
                f"rows of model '{self.lane.manifest.model}' were found to influence each other: a request cannot run "
                f"in parts, so it may have at most {self.rows_max} rows, not {request.rows}"
            )
        self._check_outputs(request.rows * self.lane.packer.row_bytes_known)

    def admit_outputs(self, request: Request, more_bytes: int, size_bytes: int) -> None:
        """Add `more_bytes` to the permit of a request whose outputs take `size_bytes` now.

        Raises Failure: TOO_LARGE, UNAVAILABLE (the gateway is full).
        """
        self._check_outputs(size_bytes)
        if more_bytes:
            self.lane.context.admission.extend(request, more_bytes)

    def _check_outputs(self, size_bytes: int) -> None:
        bytes_max = self.lane.context.reply_bytes_max
        if size_bytes > bytes_max:
            raise Failure(Code.TOO_LARGE, too_large(size_bytes, bytes_max))

    def begin(self, request: Request) -> None:
        """Let the first parts of an admitted request wait."""
        request.split = split = SplitRequest(request, self)
        self.open.add(split)
        self.fill(split)

    def adopt(self, splits: Iterable[SplitRequest], lane: RequestLane) -> None:
        """Take over requests from the lane of another pool. `lane`: this one."""
        for split in tuple(splits):
            split.splits.open.discard(split)
            split.splits, split.whole.lane = self, lane
            self.open.add(split)
            self.lane.context.timed.add(self.lane)

    def fill(self, split: SplitRequest) -> None:
        """Let the next parts of a request wait, so that the lane's requests in parts keep all its slots busy.

        They share the slots, but each of them has a part in the lane.
        """
        window = max(1, max(DEPTH, self.lane.policy.credits) // len(self.open))
        self._enter(split, window - len(split.parts))

    def _enter(self, split: SplitRequest, count: int) -> None:
        parts = split.next_parts(count, self.lane.policy.batch_rows, self.lane.clock())
        try:
            for part in parts:
                self._admission.check_served(part)
        except Failure as failure:
            split.fail(split.whole, failure)
        else:
            split.parts.update(parts)
            self.lane.context.timed.add(self.lane)
            self._dispatcher.enter(parts)

    def flush(self) -> None:
        """Let all remaining parts wait: the lane closes, and sends what waits."""
        for split in tuple(self.open):
            self._enter(split, split.rows_left)

    def tick(self, now: float) -> None:
        """Fail the requests whose deadline has passed: their parts may wait behind requests with later deadlines."""
        for split in tuple(self.open):
            if split.whole.deadline <= now:
                split.fail(split.whole, Failure(Code.EXPIRED, LATE))

    def trace(self, request: Request, reply: Reply, header: ReplyHeader, put_at: float, now: float) -> None:
        """Trace a request that has all outputs, with the times of its last part."""
        for recorder in self.lane.context.recorders:
            if recorder.on:
                guarded(recorder.split, self.lane.manifest, request, reply, header, put_at, now)
