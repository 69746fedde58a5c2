"""Every Redis key, from one place. All keys of a pool share the hash tag {pool}, so that a pool lives on one shard.

mr:{cpu}:stream:<lane>     stream: entries = batches; one consumer group "w"
mr:{cpu}:ready             sorted set: lanes with undelivered entries, by what they ran (ms): the least comes next
mr:{cpu}:deadlines         hash: the earliest deadline (ms) of each ready lane, as far as it is known
mr:{cpu}:shares            sorted set: other lanes that ran more than they had to wait for (ms), and "": what all others count as
mr:{cpu}:idle              sorted set: workers waiting for work, by batches in hand
mr:{cpu}:held:<worker>     set: lanes that the worker can run
mr:{cpu}:draining:<worker> set: lanes that the worker takes no more of, but still leases entries of
mr:{cpu}:inbox:<worker>    list: entries delivered to the worker while it was idle
mr:{cpu}:running:<worker>  string: the suspected batch that the worker runs alone (expires)
mr:{cpu}:workers           sorted set: workers by last heartbeat (ms, Redis clock)
mr:{cpu}:record:<worker>   string: the worker's record (JSON, expires)
mr:{cpu}:replies:<gateway> list: replies on their way to a gateway's n-th connection, <gateway>-<n> (expires)
mr:{cpu}:blob:<id>         string: tensors too large for a script (expires)
mr:pools                   set: pools that ever had a worker
mr:epoch                   string: changes when Redis lost its data
mr:uploads                 hash: uploads that are being received or checked, each with a time after which it counts no more
mr:gateways                hash: gateways and the state of the repository that each routes by, with such a time, too
mr:changes                 channel: "model:<name>", "worker:<pool>", "died:<worker>", "poison:<digest>"
"""

from __future__ import annotations

GROUP = b"w"
POOLS = b"mr:pools"
EPOCH = b"mr:epoch"
UPLOADS = b"mr:uploads"
GATEWAYS = b"mr:gateways"
CHANGES = b"mr:changes"


class PoolKeys:
    """The keys of one pool. A lane is named by the release it serves (`Manifest.release`)."""

    __slots__ = ("deadlines", "idle", "pool", "prefix", "ready", "shares", "workers")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.prefix = b"mr:{%s}:" % pool.encode()
        self.ready = self.prefix + b"ready"
        self.deadlines = self.prefix + b"deadlines"
        self.shares = self.prefix + b"shares"
        self.idle = self.prefix + b"idle"
        self.workers = self.prefix + b"workers"

    def stream(self, lane: str) -> bytes:
        return self.prefix + b"stream:" + lane.encode()

    def held(self, worker: str) -> bytes:
        return self.prefix + b"held:" + worker.encode()

    def draining(self, worker: str) -> bytes:
        return self.prefix + b"draining:" + worker.encode()

    def inbox(self, worker: str) -> bytes:
        return self.prefix + b"inbox:" + worker.encode()

    def running(self, worker: str) -> bytes:
        return self.prefix + b"running:" + worker.encode()

    def record(self, worker: str) -> bytes:
        return self.prefix + b"record:" + worker.encode()

    def replies(self, gateway: str) -> bytes:
        return self.prefix + b"replies:" + gateway.encode()

    def blob(self, name: str) -> bytes:
        return self.prefix + b"blob:" + name.encode()
