"""A lane for tests: the test answers its batches and advances its clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millstream.gateway.access.gate import Gate
from millstream.gateway.placement.demands import ColdLane, ColdRequest
from millstream.gateway.scheduling.direct_dispatch import DirectDispatch
from millstream.gateway.scheduling.in_flight import PROVEN_RUNS
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import PoolContext
from millstream.gateway.scheduling.lane_table import LaneTable
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.request import Admission, Request, Responder
from millstream.gateway.tensors.inputs import InputTensor
from millstream.services.metrics import catalogue
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import ModelConfig
from millstream.services.model.profile import Profile
from millstream.services.queue.keys import InstallationKeys
from millstream.services.repository.folder import FolderRepository
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import ReplyHeader, ReplyOutput, decode_batch
from tests.kit.loopback import NOWHERE, LoopbackLink
from tests.kit.responders import DISCARD
from tests.kit.versions import publish

ROW = bytes(16)  # of tests.kit.versions' signature
SPIN_S = 0.0004
REST_S = 60.0
PERMITS = 1000
BYTES_MAX = 1 << 20
ROWS_WAITING_MAX = 1000


class HeldLink(LoopbackLink):
    """Keeps the batches that are put; `up` says whether Redis is reachable."""

    def __init__(self, producer: Producer, pool: str = "cpu") -> None:
        super().__init__(producer, pool)
        self.held = self.up = True

    @property
    def writable(self) -> bool:
        return self.up

    @property
    def connected(self) -> bool:
        return self.up


class Owner:
    """The owner of lanes whose pools have workers as the test says, and load versions as it says."""

    def __init__(self) -> None:
        self.staffed: dict[str, bool] = {}
        self.newest = False
        self.load: Callable[[ColdLane, ColdRequest], None] = lambda _lane, _request: None

    def load_for(self, lane: ColdLane, request: ColdRequest) -> None:
        self.load(lane, request)

    def load_again(self, lane: ColdLane) -> None:
        return

    def blame(self, pool: str, content_id: str, event: str) -> None:
        return

    def has_workers(self, pool: str) -> bool:
        return self.staffed.get(pool, True)

    def reads_newest(self, pool: str) -> bool:
        return self.newest


class LaneBench:
    """A lane with its clock, timers and event loop turns under the test's control.

    `profile` gives the seconds of a run by its rows; `put` lists the rows of each batch sent and not answered. `early`:
    whether the pool has workers that read the newest batch format, so that cold lanes have a request ahead.
    """

    def __init__(
        self,
        home: Path,
        profile: dict[int, float],
        instances: int = 1,
        *,
        permits: int = PERMITS,
        rows_waiting_max: int = ROWS_WAITING_MAX,
        segments: SegmentPool | None = None,
        config: ModelConfig | None = None,
        early: bool = False,
        lanes: LaneTable | None = None,
        direct: DirectDispatch | None = None,
        reply_bytes_max: int = 256 << 20,
    ) -> None:
        self.now = 0.0
        self.owner = Owner()
        self.owner.newest = early
        self.lanes = lanes or LaneTable()
        tally = MetricsRegistry(None, "gateway")
        refused = tally.counter(catalogue.REQUESTS_REFUSED, "gateway_full")
        self.producer = Producer(NOWHERE, InstallationKeys("test"), "bench", self.lanes, tally, 2.0)
        self.link = HeldLink(self.producer)
        self.pending = self.lanes.pending
        self.admission = Admission(permits, BYTES_MAX, tally.gauge(catalogue.REQUESTS_IN_FLIGHT), refused)
        self._soon: list[Callable[[], None]] = []
        self.timers: list[tuple[float, Callable[[int], None], int]] = []
        self.shared = PoolContext(
            "cpu",
            self.link,
            self.pending,
            self.admission,
            Quarantine(tally.gauge(catalogue.REQUESTS_QUARANTINED), refused, lambda _: None),
            Gate(),
            self.owner,
            rows_waiting_max,
            SPIN_S,
            REST_S,
            self._soon.append,
            lambda seconds, call, number: self.timers.append((self.now + seconds, call, number)),
            lambda: self.now,
            batch_bytes_max=BYTES_MAX // 2,
            reply_bytes_max=reply_bytes_max,
            direct=None if direct is None else direct.send,
            timed=self.lanes.timed,
            used=self.lanes.used,
        )
        self._repository, self._tally, self._segments = FolderRepository(home), tally, segments
        self.tally = tally
        self.lane = self.another("m", profile, instances, config)

    def another(
        self, name: str, profile: dict[int, float], instances: int = 1, config: ModelConfig | None = None
    ) -> Lane:
        """Return a further lane of the pool, ready and proven; its largest run is the largest in `profile`."""
        manifest = publish(self._repository, name, 1, config)
        packer = Packer(manifest.signature, self._segments, 1 << 10)
        lane = Lane(manifest, self.shared, packer, LaneMetrics(self._tally, manifest, "cpu"))
        self.lanes.add(lane)
        lane.update_instances(
            instances, Profile(profile), max(profile), same_host=self._segments is not None, failed=None
        )
        for _ in range(PROVEN_RUNS):
            lane._in_flight.ran(0.0, self.now)
        return lane

    def request(
        self, rows: int = 1, timeout_s: float = 60.0, priority: int = 0, responder: Responder = DISCARD
    ) -> Request:
        """Return a request that arrives now."""
        inputs = [InputTensor((rows, 4), ROW * rows, 16 * rows)]
        return Request(inputs, rows, priority, self.now, self.now + timeout_s, responder)

    def add_requests(self, requests: int) -> None:
        """Add this many requests of one row in one turn of the event loop."""
        for _ in range(requests):
            self.lane.add(self.request(), 16)
        self.turn()

    def turn(self) -> None:
        """Run one turn of the event loop."""
        soon = self._soon.copy()
        self._soon.clear()
        for call in soon:
            call()

    def pass_time(self, seconds: float) -> int:
        """Advance the clock in ten steps; return how many of them had something to call."""
        turned = 0
        for _ in range(10):
            self.now += seconds / 10
            turned += bool(self._soon)
            self.turn()
        return turned

    @property
    def put(self) -> list[int]:
        return [sum(decode_batch(entry)[0].rows) for entry, _ in self.link.waiting]

    def answer(
        self, at: int = 0, failures: dict[int, list[str]] | None = None, attempt: int = 1, columns: int = 2
    ) -> None:
        """Answer the batch at position `at` of those that were put, by default the first.

        `failures` are codes and messages by the position of the request in the batch, `columns` those of the output.
        """
        failures = failures or {}
        entry, _ = self.link.waiting.pop(at)
        header, _ = decode_batch(entry)
        rows = sum(rows for i, rows in enumerate(header.rows) if i not in failures)
        output = ReplyOutput((columns,), rows * 4 * columns, None, None)
        outputs, runs = ([output], [rows]) if rows else ([], [])
        reply = ReplyHeader(header.name, "w", 0.0, 0.0, 0.0, 0.0, rows, runs, failures, outputs, "", attempt)
        batch = self.pending.get(header.name)
        if batch is not None:  # otherwise it was put again, or no caller waits for it
            self.lanes.of(batch.lane).completion.resolve(batch, reply, memoryview(bytes(rows * 4 * columns)))
        self.turn()
