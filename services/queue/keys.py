"""Every Redis key, from one place.

Keys begin with the number of the protocol and the name of the installation. Processes of two installations, or of two
releases whose protocols differ, can share one Redis: they do not see each other.

All keys of a pool share a hash tag, so that a pool is on one shard. Every key of a script is one of a single pool.

Keys of a pool, ms:3:{millstream:cpu}:...
  stream:<lane>       stream: entries = batches; one consumer group, "w"
  ready               sorted set: lanes with undelivered entries, by virtual time (ms of run time); the least is next
  deadlines           hash: the earliest known deadline (ms) of each ready lane
  vtimes              sorted set: virtual times of other lanes that are ahead of the pool's, which is under ""
  called, called_long sorted sets: lanes that were called lately, by when (ms), those with long runs apart; a call that
                      an idle worker got at once is noted when its worker tells what it ran (expire)
  long                sorted set: lanes with long runs, by until when they count as such (ms; expires)
  held                hash: workers that have a batch of a lane with long runs, or are inside a long run, each with the
                      lane (expires)
  idle                sorted set: workers that wait for work, by the number of batches that they lease
  lanes:<worker>      set: lanes that the worker serves
  draining:<worker>   set: lanes of which the worker takes no more entries, but still leases some
  inbox:<worker>      list: entries delivered to the worker while it was idle
  running:<worker>    string: the suspect batch that the worker runs alone (expires)
  workers             sorted set: workers by last heartbeat (ms, Redis clock)
  record:<worker>     string: the worker's record without its instances (JSON, expires)
  instances:<worker>  hash: the records of the worker's instances (JSON) by content id (expires)
  replies:<gateway>   list: replies on their way to a gateway's n-th connection, <gateway>-<n> (expires)
  reply_address:<gateway>
                      string: where the gateway takes replies of workers on other hosts, and the pool's secret for it
                      (queue.reply_protocol; expires)
  left:<batch>        string: all callers of the batch have gone, and its run is to be ended (expires)
  blob:<id>           list: tensors too large for a script, in parts (expires)
  demands             hash: lanes that a gateway ordered a worker to load, each with that worker and until when (ms)
  fence               string: the highest fencing token of a controller that gave orders to the pool (expires)
  orders:<worker>     list: what the worker is to load or unload (wire.orders; expires)
  blamed              hash: how often each version ended workers recently, and until when it is refused
  counted:<event>     string: marks an event that was counted in the hash above (expires)
  epoch               string: changes when Redis lost its data (expires when no gateway reads it)

Keys of the installation, ms:3:{millstream}:...
  pools               set: pools that have workers (expires when no worker of any pool beats)
  uploads             hash: uploads that are being received or checked, each with the time when it expires
  gateways            hash: gateways and the state of the repository that each routes by, each with such a time
  loads               hash: what each gateway counted of each pool (wire.scaling), with the time when it expires
  scale               hash: how many workers each pool should have, by the leading controller (wire.scaling; expires)
  scale_changes:<pool>
                      list: the last decisions that changed how many workers a pool should have, newest first (expires)
  console_looked      string: since when calls are recorded for a console that looks at them (expires)
  console_calls       hash: the slowest and the failed calls of each gateway, while a console looks (expires)
  leader              string: the controller that leads, and its fencing token (expires)
  leader_token        string: the last fencing token that was given out
  use                 hash: what API keys with limits used through each gateway, each with the time of writing
  memory_taken        hash: what models of keys with a memory quota take in each worker, with the time when that expires
  keys_read           hash: the number of the last change of API keys, under ""; and the last that each gateway read
  log_levels          hash: the log level of each kind of process that has one (expires)
  changes             channel: "model:<name> <gateway>", "worker:<pool>", "died:<worker> <what it ran>",
                      "poison:<digest>", "keys:" (API keys changed)
"""

from __future__ import annotations

#: Incremented when keys, scripts or the meaning of entries change so that the previous release cannot take part.
PROTOCOL = 3
GROUP = b"w"


class InstallationKeys:
    """The keys of one installation, and those of its pools.

    Args:
        installation: its name, without colons and braces (`millstream.services.installation`).
    """

    def __init__(self, installation: str) -> None:
        self.installation = installation
        prefix = b"ms:%d:{%s}:" % (PROTOCOL, installation.encode())
        self.pools = prefix + b"pools"
        self.uploads = prefix + b"uploads"
        self.use = prefix + b"use"
        self.memory_taken = prefix + b"memory_taken"
        self.keys_read = prefix + b"keys_read"
        self.gateways = prefix + b"gateways"
        self.loads = prefix + b"loads"
        self.log_levels = prefix + b"log_levels"
        self.scale = prefix + b"scale"
        self.console_looked = prefix + b"console_looked"
        self.console_calls = prefix + b"console_calls"
        self.leader = prefix + b"leader"
        self.leader_token = prefix + b"leader_token"
        self.changes = prefix + b"changes"

    def pool(self, name: str) -> PoolKeys:
        return PoolKeys(self, name)

    def scale_changes(self, pool: str) -> bytes:
        return self.scale + b"_changes:" + pool.encode()


class PoolKeys:
    """The keys of one pool. A lane is named by the content id that it serves (`Manifest.content_id`)."""

    def __init__(self, of_installation: InstallationKeys, pool: str) -> None:
        self.of_installation = of_installation
        self.pool = pool
        self.prefix = b"ms:%d:{%s:%s}:" % (PROTOCOL, of_installation.installation.encode(), pool.encode())
        self.ready = self.prefix + b"ready"
        self.deadlines = self.prefix + b"deadlines"
        self.vtimes = self.prefix + b"vtimes"
        self.idle = self.prefix + b"idle"
        self.workers = self.prefix + b"workers"
        self.blamed = self.prefix + b"blamed"
        self.demands = self.prefix + b"demands"
        self.epoch = self.prefix + b"epoch"
        self.fence = self.prefix + b"fence"
        #: the first keys of every script that moves batches (_prelude.lua)
        self.scheduling = (self.ready, self.deadlines, self.vtimes, self.idle, self.workers)

    def stream(self, lane: str) -> bytes:
        return self.prefix + b"stream:" + lane.encode()

    def lanes(self, worker: str) -> bytes:
        return self.prefix + b"lanes:" + worker.encode()

    def draining(self, worker: str) -> bytes:
        return self.prefix + b"draining:" + worker.encode()

    def inbox(self, worker: str) -> bytes:
        return self.prefix + b"inbox:" + worker.encode()

    def orders(self, worker: str) -> bytes:
        return self.prefix + b"orders:" + worker.encode()

    def running(self, worker: str) -> bytes:
        return self.prefix + b"running:" + worker.encode()

    def counted(self, event: str) -> bytes:
        return self.prefix + b"counted:" + event.encode()

    def record(self, worker: str) -> bytes:
        return self.prefix + b"record:" + worker.encode()

    def instances(self, worker: str) -> bytes:
        return self.prefix + b"instances:" + worker.encode()

    def replies(self, gateway: str) -> bytes:
        return self.prefix + b"replies:" + gateway.encode()

    def reply_address(self, gateway: str) -> bytes:
        return self.prefix + b"reply_address:" + gateway.encode()

    def gateway_of(self, replies: bytes) -> str:
        """Return the name of the gateway that reads a reply list, which is `replies(f"{gateway}-{n}")`."""
        return replies[len(self.prefix) + len(b"replies:") :].rpartition(b"-")[0].decode(errors="replace")

    def left(self, name: str) -> bytes:
        return self.prefix + b"left:" + name.encode()

    def blob(self, name: str) -> bytes:
        return self.prefix + b"blob:" + name.encode()
