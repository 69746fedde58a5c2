"""What a key may use, and what it has used. Pure; time is passed in.

enter (requests, calls at once) ─> add_rows, add_compute (paid afterwards) ─> leave
others' use ─> settle: each gateway knows the use of all, some tenths of a second late (texts in Redis with totals since
a gateway started, so that a lost or a late one loses nothing)

Rows and compute time are known only after a request was let in. So they are charged afterwards: the account may go into
debt by the requests that are in flight, and refuses further ones until the debt is paid. Rows are never forgiven: a
request whose debt would be too large is refused when its rows are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from millstream.services.access.document import Limits
from millstream.services.errors import Code, Failure

MINUTE_S = 60.0
#: Seconds of the rate that a debt is at most: one huge request locks a key out for an hour, not for days. Rows beyond
#: are refused; the time of a run is known only when it has passed, so time beyond is not charged.
DEBT_S_MAX = 3600.0
RETRY_S_CONCURRENCY = 1.0  # when to try again if too many calls are in flight
RETRY_S_UPLOADS = 5.0  # likewise, of uploads


class LimitReached(Failure):
    """A limit of a key. `headers`: RateLimit headers of the reply (IETF draft-ietf-httpapi-ratelimit-headers)."""

    def __init__(self, message: str, retry_after_s: float, headers: tuple[tuple[str, str], ...]) -> None:
        super().__init__(Code.OVERLOADED, message, retry_after_s=retry_after_s)
        self.headers = headers


class Use(NamedTuple):
    """What a key has used through one gateway since that started, and its calls and uploads in flight."""

    requests: float = 0.0
    rows: float = 0.0
    compute_s: float = 0.0
    in_flight: int = 0
    uploads: int = 0


class Bucket:
    """A token bucket that may go into debt.

    Args:
        rate: tokens a second.
        window_s: seconds of the rate that it holds when it is full.
    """

    __slots__ = ("_at", "_rate", "burst", "debt_max", "level")

    def __init__(self, rate: float, window_s: float, now: float) -> None:
        self._rate = rate
        self.burst = max(rate * window_s, 1.0) if window_s <= 1.0 else rate * window_s
        self.level = self.burst
        self.debt_max = rate * DEBT_S_MAX
        self._at = now

    def wait_s(self, needed: float, now: float) -> float:
        """Return the seconds until the level is `needed`; 0: it is already."""
        if now > self._at:
            self.level = min(self.burst, self.level + (now - self._at) * self._rate)
            self._at = now
        return 0.0 if self.level >= needed else (needed - self.level) / self._rate

    def take(self, amount: float) -> None:
        """Take tokens, also when there are none left."""
        self.level -= amount

    def take_to_debt(self, amount: float) -> None:
        """Take tokens, and leave the debt at `debt_max` if it would be larger."""
        self.level = max(self.level - amount, min(self.level, -self.debt_max))


class Account:
    """What one key has used, as one gateway knows it. `requests` to `uploads` are what this gateway added.

    Args:
        name: of the key, for messages.
        limits: at least one.
        now: an instant of the monotonic clock, as in all methods.
    """

    __slots__ = (
        "_compute",
        "_requests",
        "_rows",
        "compute_s",
        "in_flight",
        "limits",
        "name",
        "others_in_flight",
        "others_uploads",
        "requests",
        "rows",
        "uploads",
    )

    def __init__(self, name: str, limits: Limits, now: float) -> None:
        self.name = name
        self.requests = self.rows = self.compute_s = 0.0
        self.in_flight = self.others_in_flight = 0
        self.uploads = self.others_uploads = 0
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Apply other limits, with full buckets."""
        self.limits = limits
        self._requests = _bucket(limits.requests_per_s, 1.0, now)
        self._rows = _bucket(limits.rows_per_s, 1.0, now)
        compute = limits.compute_s_per_minute
        self._compute = _bucket(None if compute is None else compute / MINUTE_S, MINUTE_S, now)

    def enter(self, now: float) -> None:
        """Count a call, which ends with `leave`. Raises LimitReached, and counts nothing."""
        limits = self.limits
        if limits.concurrency is not None and self.in_flight + self.others_in_flight >= limits.concurrency:
            raise self._reached("concurrency", limits.concurrency, "calls at once", RETRY_S_CONCURRENCY, 0)
        if self._rows is not None and (wait_s := self._rows.wait_s(1e-9, now)):
            raise self._reached("rows", limits.rows_per_s, "rows/s", wait_s, 1)
        if self._compute is not None and (wait_s := self._compute.wait_s(1e-9, now)):
            raise self._reached("compute", limits.compute_s_per_minute, "seconds of runs a minute", wait_s, 60)
        if self._requests is not None:
            if wait_s := self._requests.wait_s(1.0, now):
                raise self._reached("requests", limits.requests_per_s, "requests/s", wait_s, 1)
            self._requests.take(1.0)
        self.requests += 1.0
        self.in_flight += 1

    def outlive(self) -> None:
        """Count a run that goes on though its call has left. The run ends with `leave`, too."""
        self.in_flight += 1

    def leave(self) -> None:
        """End a call, or a run, that was counted."""
        self.in_flight -= 1

    def begin_upload(self) -> None:
        """Count an upload, which ends with `end_upload`. Raises LimitReached, and counts nothing."""
        limit = self.limits.uploads
        if limit is not None and self.uploads + self.others_uploads >= limit:
            raise self._reached("uploads", limit, "uploads at once", RETRY_S_UPLOADS, 0)
        self.uploads += 1

    def end_upload(self) -> None:
        """End an upload that was counted."""
        self.uploads -= 1

    def add_rows(self, rows: int, now: float) -> None:
        """Charge the rows of a request that was let in.

        Raises:
            Failure: TOO_LARGE: no wait would do. LimitReached: the debt would be too large now. Nothing is charged.
        """
        bucket = self._rows
        if bucket is not None:
            if rows > bucket.burst + bucket.debt_max:
                raise Failure(
                    Code.TOO_LARGE,
                    f"key '{self.name}' may send {self.limits.rows_per_s:g} rows/s, and {rows} rows would take it more "
                    f"than {DEBT_S_MAX / MINUTE_S:g} minutes: send fewer rows in one request",
                )
            if wait_s := bucket.wait_s(rows - bucket.debt_max, now):
                raise self._reached("rows", self.limits.rows_per_s, "rows/s", wait_s, 1)
            bucket.take(rows)
        self.rows += rows

    def add_compute(self, seconds: float) -> None:
        """Charge a request's part of a run."""
        self.compute_s += seconds
        if self._compute is not None:
            self._compute.take_to_debt(seconds)

    @property
    def use(self) -> Use:
        """What this gateway added."""
        return Use(self.requests, self.rows, self.compute_s, self.in_flight, self.uploads)

    def settle(self, others: Use, now: float) -> None:
        """Charge what the other gateways let in since the last call. `others.in_flight`, `.uploads`: theirs now."""
        for bucket, amount in ((self._requests, others.requests), (self._rows, others.rows)):
            if bucket is not None:
                bucket.wait_s(0.0, now)
                bucket.take(amount)
        if self._compute is not None:
            self._compute.wait_s(0.0, now)
            self._compute.take_to_debt(others.compute_s)
        self.others_in_flight = others.in_flight
        self.others_uploads = others.uploads

    def _reached(self, what: str, limit: float | None, unit: str, wait_s: float, window_s: int) -> LimitReached:
        assert limit is not None
        window = f";w={window_s}" if window_s else ""
        headers = (
            ("ratelimit-policy", f'"{what}";q={max(1, round(limit))}{window}'),
            ("ratelimit", f'"{what}";r=0;t={max(1, int(wait_s) + (wait_s > int(wait_s)))}'),
        )
        wait = f"{wait_s:.0f}" if wait_s >= 10 else f"{wait_s:.2g}"
        message = f"key '{self.name}' has reached its limit of {limit:g} {unit}: try again in {wait} s"
        return LimitReached(message, wait_s, headers)


def _bucket(rate: float | None, window_s: float, now: float) -> Bucket | None:
    return None if rate is None else Bucket(rate, window_s, now)


#: Gateways whose use is remembered. A gateway without calls sends nothing, and later continues with its totals.
GATEWAYS_MAX = 256
_decoder = msgspec.json.Decoder(dict[str, Use])


def write_use(accounts: Mapping[str, Account]) -> str:
    """Return the text of a gateway: what each key has used through it."""
    return msgspec.json.encode({key_id: account.use for key_id, account in accounts.items()}).decode()


def read_use(text: str) -> dict[str, Use]:
    """Return the content of a text; empty if another release wrote it."""
    try:
        return _decoder.decode(text)
    except msgspec.DecodeError:
        return {}


class Settlement:
    """What this gateway knows of the use of keys through the others."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Use]] = {}  # by gateway and key, the gateway that was seen last at the end

    def apply(self, texts: Mapping[str, str], accounts: Mapping[str, Account], now: float) -> None:
        """Charge what other gateways let in since the last call: texts of all live gateways, except this one."""
        added: dict[str, Use] = {}
        for gateway, text in texts.items():
            before = self._seen.pop(gateway, None)
            seen = self._seen[gateway] = read_use(text)
            for key_id, use in seen.items():
                # What a gateway let in before this one knew it is not charged: most of it was long ago.
                last = use if before is None else before.get(key_id, Use())
                added[key_id] = _plus(added.get(key_id, Use()), use, last)
        while len(self._seen) > GATEWAYS_MAX:
            del self._seen[next(iter(self._seen))]
        for key_id, account in accounts.items():
            account.settle(added.get(key_id, Use()), now)


def _plus(total: Use, use: Use, last: Use) -> Use:
    return Use(
        total.requests + max(0.0, use.requests - last.requests),
        total.rows + max(0.0, use.rows - last.rows),
        total.compute_s + max(0.0, use.compute_s - last.compute_s),
        total.in_flight + max(0, use.in_flight),
        total.uploads + max(0, use.uploads),
    )
