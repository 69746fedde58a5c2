"""Checks the keys of calls. Pure; the clocks are passed in.

header ─memo─> Principal ─> may it run this model? ─> account: limits ─> Pass, which ends with the call

The memo is a dict by the bytes of the header, so that the hot path does not parse or hash a key that it has seen. Only
right keys are in it. A wrong key costs one SHA-256, and takes no memory.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable
from typing import NamedTuple

from millstream.gateway.access.principal import (
    CALLER,
    EXPIRED,
    LIMITED,
    MALFORMED,
    MISSING,
    REVOKED,
    SIGNATURE,
    UNKNOWN,
    KeyCounters,
    Principal,
)
from millstream.services.access import secret as keys
from millstream.services.access.document import KeyDocument, Limits
from millstream.services.access.limits import Account, LimitReached
from millstream.services.access.scopes import ALL, Grants, Need, Row, grants_of
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter

MEMO_MAX = 8192  # headers that are recognised by their bytes; beyond, all are forgotten
CREDENTIAL_BYTES_MAX = 512  # longer headers are verified each time, which bounds the memo in bytes, too
NO_KEY = "none"  # label value of calls without a right key
ADMIN = "admin"  # label value of MILLSTREAM_ADMIN_KEY
LOCAL = "local"  # label value of the token in the home
METRICS = "metrics"  # label value of MILLSTREAM_METRICS_KEY
_INFER = Row(Need.INFER)
_OPEN = Grants(infer=(re.compile(".*"),), metrics=True)  # what callers may do whose key is not right, if they may call
_NO_HASH = keys.hash_secret("")
_HOW = (
    "send a key: 'Authorization: Bearer KEY' or 'X-API-Key: KEY'; operators on the server's machine: curl -H "
    "@HOME/run/token"
)


class Unidentified(Failure):
    """The refusal of a call without a right key. `key`: name of the key that was right once."""

    def __init__(self, message: str, reason: str, key: str = "") -> None:
        super().__init__(Code.UNAUTHENTICATED, message)
        self.reason = reason
        self.key = key


def _uncounted(name: str) -> KeyCounters:
    counter = Counter(memoryview(bytearray(8)).cast("d"), 0)
    return KeyCounters(name, lambda _outcome: counter, counter, counter)


class Pass(NamedTuple):
    """A call that was let in. `leave` ends it."""

    principal: Principal
    account: Account | None

    def leave(self) -> None:
        if self.account is not None:
            self.account.leave()


class Keyless(NamedTuple):
    """What calls without a right key may do.

    Args:
        open_control: change things over other protocols than the admin API while no API key exists.
        warns: what they may do while no API key exists; they are counted.
    """

    open_control: bool = False
    warns: bool = False


class KnownKey(NamedTuple):
    """A key and its account. `principals`: by the hashes of its secrets."""

    document: KeyDocument
    account: Account | None
    principals: dict[str, Principal]


class Gate:
    """The check of one gateway.

    The three keys are None where there are none. `counters`: name of a key -> its counters; `wall`: returns seconds
    since the epoch; `monotonic`: seconds of a clock for rates.
    """

    def __init__(
        self,
        admin_key: str | None = None,
        counters: Callable[[str], KeyCounters] = _uncounted,
        wall: Callable[[], float] = time.time,  # noqa: TID251 - expiries are instants for people
        monotonic: Callable[[], float] = time.monotonic,
        metrics_key: str | None = None,
        local_token: str | None = None,
        keyless: Keyless = Keyless(),  # noqa: B008 - it is immutable
    ) -> None:
        #: whether calls need a key: there is one, also if it was revoked or has expired
        self.enforced = False
        #: id of the key, salt -> its secret, for requests that are signed; None: of another access secret
        self.secret_of: Callable[[str, str], str] = lambda _id, _salt: ""
        self._admin_key = admin_key
        self._metrics_key = metrics_key
        self._local_token = local_token
        self._open_control = keyless.open_control
        self.warns = keyless.warns
        #: calls that were served though a key would have refused them, by outcome
        self.warned: Counts[str] = Counts()
        self._anybody = Principal("caller without a right key", "", _OPEN, math.inf, None, 0, _uncounted(""))
        self._counters = counters
        self.wall = wall
        self._monotonic = monotonic
        self._memo: dict[bytes, Principal] = {}
        self._known: dict[str, KnownKey] = {}
        self._admin = Principal("admin key", "", ALL, math.inf, None, 0, counters(ADMIN))
        self._metrics = Principal("metrics key", "", grants_of(("metrics",)), math.inf, None, 0, counters(METRICS))
        self._local = Principal("local caller", "", ALL, math.inf, None, 0, counters(LOCAL))

    def load(self, documents: Iterable[KeyDocument], *, others: bool = False) -> None:
        """Replace the keys. `others`: whether there are keys that could not be read; they are refused."""
        before = self._known
        documents = list(documents)
        self._known = {document.id: self._update(before.get(document.id), document) for document in documents}
        for key_id, known in before.items():
            if key_id not in self._known:
                _end(known.principals.values())
        self._memo.clear()
        self.enforced = others or bool(documents)

    def _update(self, known: KnownKey | None, document: KeyDocument) -> KnownKey:
        if known is not None and known.document == document:
            return known
        account = None if known is None else known.account
        limits = document.limits
        if self.warns or not limits.any:
            account = None
        elif account is None:
            account = Account(document.name, limits, self._monotonic())
        elif account.limits != limits:
            account.change(limits, self._monotonic())
        principals = {} if known is None else known.principals
        grants, live = grants_of(document.scopes), {}
        label = f"key {document.id} ({document.name})"
        for stored in document.secrets:
            ends = [end for end in (document.expires_at, stored.expires_at) if end is not None]
            expires_at = min(ends, default=math.inf)
            principal = principals.get(stored.sha256)
            if principal is None:
                counter = self._counters(document.name)
                principal = Principal(
                    label, document.id, grants, expires_at, account, document.priority_max or 0, counter
                )
                principal.warned = self.warned if self.warns else None
            else:
                principal.change(grants, expires_at, account, document.priority_max or 0)
            live[stored.sha256] = principal
        _end(principal for sha256, principal in principals.items() if sha256 not in live)
        return KnownKey(document, account, live)

    def is_open(self, row: Row) -> bool:
        """Whether anybody may make a call."""
        if row.need is Need.OPEN:
            return True
        return not self.enforced and (row.keyless or (self._open_control and not row.admin))

    def accounts(self) -> dict[str, Account]:
        """Return the accounts of the keys that have limits, by the keys' ids."""
        return {key_id: known.account for key_id, known in self._known.items() if known.account is not None}

    def limits_of(self, name: str) -> Limits | None:
        """Return the limits of the newest key of a name that was not revoked; None: there is none, or it has none."""
        for known in reversed(self._known.values()):
            if known.document.name == name and known.principals:
                return None if known.account is None else known.account.limits
        return None

    def identify(self, credential: bytes | None, row: Row | None = None) -> Principal:
        """Return who sent the header `credential` (Authorization, or X-API-Key). Raises Failure(UNAUTHENTICATED).

        `row`: what the call needs; a gate that warns serves it though the key is not right, if none was needed before.
        """
        principal = self.recognise(credential)
        if principal is not None:
            return principal
        try:
            principal = self._verified(credential)
        except Failure as failure:
            return self.unidentified(failure, row)
        assert credential is not None
        if len(credential) <= CREDENTIAL_BYTES_MAX:
            if len(self._memo) >= MEMO_MAX:
                self._memo.clear()
            self._memo[credential] = principal
        return principal

    def unidentified(self, failure: Failure, row: Row | None) -> Principal:
        """Count a call without a right key, and return who makes it if it is served all the same, else raise."""
        reason, name = SIGNATURE, NO_KEY
        if isinstance(failure, Unidentified):
            reason, name = failure.reason, failure.key or NO_KEY
        self._counters(name).of_outcome(reason).add()
        if not self.warns or row is None or not row.keyless:
            raise failure
        self.warned[reason] += 1
        return self._anybody

    def recognise(self, credential: bytes | None) -> Principal | None:
        """Return who sent a header that is known to be right; None: only `identify` can tell. Counts nothing."""
        principal = None if credential is None else self._memo.get(credential)
        if principal is not None and principal.live and principal.expires_at > self.wall():
            return principal
        return None

    def _verified(self, credential: bytes | None) -> Principal:
        if credential is None:
            raise Unidentified(_HOW, MISSING)
        text = keys.bearer_of(credential)
        if self._admin_key is not None and keys.same_text(text, self._admin_key):
            return self._admin
        if self._local_token is not None and keys.same_text(text, self._local_token):
            return self._local
        if self._metrics_key is not None and keys.same_text(text, self._metrics_key):
            return self._metrics
        key = keys.parse_key(text)
        if key is None:
            raise Unidentified(f"this is not a key, and this call takes no other credential: {_HOW}", MALFORMED)
        known, given, found = self._known.get(key.id), keys.hash_secret(key.secret), None
        for sha256, principal in known.principals.items() if known is not None else ():
            if keys.same_text(given, sha256):
                found = principal
        if known is None:
            keys.same_text(given, _NO_HASH)  # takes the time of a known key
        return self.live(known, found)

    def live(self, known: KnownKey | None, principal: Principal | None) -> Principal:
        """Return the caller whose secret is right, if the key still holds. Raises Failure(UNAUTHENTICATED)."""
        if known is not None and known.document.revoked_at is not None:
            raise Unidentified("the key was revoked", REVOKED, known.document.name)
        if known is None or principal is None:
            raise Unidentified("this is not a valid key", UNKNOWN)
        if principal.expires_at <= self.wall():
            raise Unidentified("the key has expired", EXPIRED, known.document.name)
        return principal

    def key(self, key_id: str) -> KnownKey | None:
        """Return a key by its id, also one that was revoked or has expired; None: there is none."""
        return self._known.get(key_id)

    def enter(self, principal: Principal, row: Row, model: str | None = None) -> Pass:
        """Let a call in that `principal` makes; `model`: that it names, None: none, or not known yet.

        Raises Failure: FORBIDDEN; LimitReached.
        """
        principal.require(row.need, model)
        return self.let_in(principal)

    def enter_infer(self, credential: bytes | None, model: str) -> Pass:
        """Let an inference request in. Raises Failure: UNAUTHENTICATED, FORBIDDEN; LimitReached."""
        principal = self.identify(credential, _INFER)
        if not principal.infers(model):
            principal.require(Need.INFER, model)
        return self.let_in(principal)

    def enter_again(self) -> Pass | None:
        """Let in one request of a stream that was let in. Raises Failure as `enter_infer` does."""
        principal = CALLER.get() if self.enforced else None
        if principal is None:
            return None
        self._check_live(principal)
        return self.let_in(principal)

    def check_still(self, principal: Principal, row: Row, model: str | None = None) -> None:
        """Check a call again that was let in, before it changes anything: its body, or its work, may take long.

        Raises Failure: UNAUTHENTICATED, FORBIDDEN. Arguments as of `enter`.
        """
        self._check_live(principal)
        principal.require(row.need, model)

    def _check_live(self, principal: Principal) -> None:
        if not principal.live or principal.expires_at <= self.wall():
            self._counters(NO_KEY).of_outcome(EXPIRED).add()
            raise Unidentified("the key was revoked, or has expired", EXPIRED)

    def let_in(self, principal: Principal) -> Pass:
        """Let in a call that its scopes allow. Raises LimitReached."""
        account = principal.account
        if account is not None:
            try:
                account.enter(self._monotonic())
            except LimitReached:
                principal.count(LIMITED)
                raise
        principal.allowed.add()
        return Pass(principal, account)

    def check_model(self, model: str) -> None:
        """Check that the caller of the current task may run `model`. Raises Failure: UNAUTHENTICATED, FORBIDDEN."""
        if not self.enforced:
            return
        principal = CALLER.get()
        if principal is None:
            raise Unidentified(_HOW, MISSING)
        self._check_live(principal)
        if not principal.infers(model):
            principal.require(Need.INFER, model)

    def refusal_of(self, credential: bytes | None) -> Failure | None:
        """Return why no call with this header is let in; None if one may be: before a body is received."""
        try:
            self.identify(credential)
        except Failure as failure:
            return failure
        return None


def platform(name: str) -> Principal:
    """Return a caller that needs no key: a platform that alone reaches its containers."""
    return Principal(name, "", ALL, math.inf, None, 0, _uncounted(name))


def _end(principals: Iterable[Principal]) -> None:
    for principal in principals:
        principal.live = False
