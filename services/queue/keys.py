"""Every Redis key, from one place.

Keys begin with the number of the protocol and the name of the installation. Processes of two installations, or of two
releases whose protocols differ, may use one Redis: they do not see each other.

All keys of a pool share a hash tag, so that a pool lives on one shard; a script gets keys of one pool only.

ms:2:{millstream:cpu}:stream:<lane>     stream: entries = batches; one consumer group "w"
ms:2:{millstream:cpu}:ready             sorted set: lanes with undelivered entries, by what they ran (ms): the least comes next
ms:2:{millstream:cpu}:deadlines         hash: the earliest deadline (ms) of each ready lane, as far as it is known
ms:2:{millstream:cpu}:shares            sorted set: other lanes that ran more than they had to wait for (ms), and "": what all others count as
ms:2:{millstream:cpu}:idle              sorted set: workers waiting for work, by batches in hand
ms:2:{millstream:cpu}:held:<worker>     set: lanes that the worker can run
ms:2:{millstream:cpu}:draining:<worker> set: lanes that the worker takes no more of, but still leases entries of
ms:2:{millstream:cpu}:inbox:<worker>    list: entries delivered to the worker while it was idle
ms:2:{millstream:cpu}:running:<worker>  string: the suspected batch that the worker runs alone (expires)
ms:2:{millstream:cpu}:workers           sorted set: workers by last heartbeat (ms, Redis clock)
ms:2:{millstream:cpu}:record:<worker>   string: the worker's record (JSON, expires)
ms:2:{millstream:cpu}:replies:<gateway> list: replies on their way to a gateway's n-th connection, <gateway>-<n>
(expires) ms:2:{millstream:cpu}:blob:<id>         list: tensors too large for a script, in parts (expires)
ms:2:{millstream:cpu}:blamed            hash: how often each version ended workers of late, and until when it is refused
ms:2:{millstream:cpu}:counted:<what>    string: this was counted for the hash above (expires)
ms:2:{millstream:cpu}:epoch             string: changes when Redis lost its data (expires when no gateway looks)
ms:2:{millstream}:pools                 set: pools that have workers (expires when none of them beats)
ms:2:{millstream}:uploads               hash: uploads that are being received or checked, each with a time after which it counts no more
ms:2:{millstream}:gateways              hash: gateways and the state of the repository that each routes by, with such a time, too
ms:2:{millstream}:changes               channel: "model:<name>", "worker:<pool>", "died:<worker> <what it ran>", "poison:<digest>"
"""

from __future__ import annotations

#: Changes when keys, scripts or what entries mean change so that processes of the release before cannot take part.
PROTOCOL = 2
GROUP = b"w"


class InstanceKeys:
    """The keys of one installation, and those of its pools."""

    __slots__ = ("changes", "gateways", "instance", "pools", "uploads")

    def __init__(self, instance: str) -> None:
        """`instance`: without colons and braces (`millstream.services.installation`)."""
        self.instance = instance
        prefix = b"ms:%d:{%s}:" % (PROTOCOL, instance.encode())
        self.pools = prefix + b"pools"
        self.uploads = prefix + b"uploads"
        self.gateways = prefix + b"gateways"
        self.changes = prefix + b"changes"

    def pool(self, name: str) -> PoolKeys:
        return PoolKeys(self, name)


class PoolKeys:
    """The keys of one pool. A lane is named by the release it serves (`Manifest.release`)."""

    __slots__ = ("blamed", "deadlines", "epoch", "idle", "of_instance", "pool", "prefix", "ready", "shares", "workers")

    def __init__(self, of_instance: InstanceKeys, pool: str) -> None:
        self.of_instance = of_instance
        self.pool = pool
        self.prefix = b"ms:%d:{%s:%s}:" % (PROTOCOL, of_instance.instance.encode(), pool.encode())
        self.ready = self.prefix + b"ready"
        self.deadlines = self.prefix + b"deadlines"
        self.shares = self.prefix + b"shares"
        self.idle = self.prefix + b"idle"
        self.workers = self.prefix + b"workers"
        self.blamed = self.prefix + b"blamed"
        self.epoch = self.prefix + b"epoch"

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

    def counted(self, what: str) -> bytes:
        return self.prefix + b"counted:" + what.encode()

    def record(self, worker: str) -> bytes:
        return self.prefix + b"record:" + worker.encode()

    def replies(self, gateway: str) -> bytes:
        return self.prefix + b"replies:" + gateway.encode()

    def blob(self, name: str) -> bytes:
        return self.prefix + b"blob:" + name.encode()
