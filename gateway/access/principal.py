"""Who calls: a key as the checks of a call need it. Pure; time is passed in."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import NamedTuple

from millstream.services.access.limits import Account
from millstream.services.access.scopes import Grants, Need
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter
from millstream.services.model.names import NAME_CHARACTERS_MAX

ALLOWED, FORBIDDEN, LIMITED = "allowed", "forbidden", "limited"  # outcomes of calls with a right key
#: outcomes of calls without a right key
MISSING, MALFORMED, UNKNOWN = "missing", "malformed", "unknown"
REVOKED, EXPIRED, SIGNATURE = "revoked", "expired", "signature"
MODELS_MAX = 4096  # names whose check is remembered, of one key; beyond, all are forgotten

_KEYLESS = frozenset({Need.INFER, Need.DESCRIBE, Need.METRICS})
_OF_MODELS = frozenset({Need.INFER, Need.DESCRIBE, Need.READ, Need.WRITE})


class KeyCounters(NamedTuple):
    """The counters of one key, by its name, which is a label value of its metrics and in the access log.

    `of_outcome`: outcome of a call -> its counter; rows, and seconds of runs, of inference requests.
    """

    name: str
    of_outcome: Callable[[str], Counter]
    rows: Counter
    run_s: Counter


class Principal:
    """A caller that has shown one secret of a key. A change of the key changes its principals in place.

    Args:
        label: for logs: `key <id> (<name>)`, or the admin key.
        key_id: id of the key; "": the admin key, or a caller on this machine without a key.
        grants: what it may do.
        expires_at: when the secret ends, in seconds since the epoch.
        account: what the key has used; None: it has no limits.
        priority_max: the highest priority of its requests (1 is the highest); 0: any.
        counters: of the key.
    """

    __slots__ = (
        "account",
        "allowed",
        "counters",
        "expires_at",
        "grants",
        "key_id",
        "label",
        "live",
        "models",
        "priority_max",
        "warned",
    )

    def __init__(
        self,
        label: str,
        key_id: str,
        grants: Grants,
        expires_at: float,
        account: Account | None,
        priority_max: int,
        counters: KeyCounters,
    ) -> None:
        self.label = label
        self.key_id = key_id
        self.grants = grants
        self.expires_at = expires_at
        self.account = account
        self.priority_max = priority_max
        #: counts calls that its scopes do not allow and that are served all the same, since they need no key while none
        #: exists; None: they are refused
        self.warned: Counts[str] | None = None
        self.counters = counters
        self.allowed = counters.of_outcome(ALLOWED)
        self.live = True
        self.models: dict[str, bool] = {}

    def count(self, outcome: str) -> None:
        """Count a call by its outcome."""
        self.counters.of_outcome(outcome).add()

    def infers(self, model: str) -> bool:
        """Whether it may run `model`."""
        try:
            return self.models[model]
        except KeyError:
            if len(model) > NAME_CHARACTERS_MAX:
                return self.grants.infers(model)  # no model has it; not remembered, which bounds the memory in bytes
            if len(self.models) >= MODELS_MAX:
                self.models.clear()
            allowed = self.models[model] = self.grants.infers(model)
            return allowed

    def sees_all(self, need: Need) -> bool:
        """Whether a list with this need shows it all models."""
        return self.grants.admin or (self.warned is not None and need in _KEYLESS)

    def require(self, need: Need, model: str | None = None) -> None:
        """Check that the scopes allow a call; arguments as of `Grants.allows`. Raises Failure(FORBIDDEN)."""
        if self.grants.allows(need, model):
            return
        self.count(FORBIDDEN)
        if self.warned is not None and need in _KEYLESS:
            self.warned[FORBIDDEN] += 1
            return
        if model is not None and len(model) > NAME_CHARACTERS_MAX:
            model = f"{model[:NAME_CHARACTERS_MAX]}…"
        scope = "infer" if need is Need.DESCRIBE else need.value
        of_model = f":{model}" if model and need in _OF_MODELS else ""
        raise Failure(Code.FORBIDDEN, f"{self.label} lacks the scope '{scope}{of_model}'")

    def change(self, grants: Grants, expires_at: float, account: Account | None, priority_max: int) -> None:
        """Apply a changed key."""
        self.grants = grants
        self.expires_at = expires_at
        self.account = account
        self.priority_max = priority_max
        self.models.clear()

    def capped(self, priority: int) -> int:
        """Return the priority of a request that asked for `priority`; 0: it asked for none."""
        return max(priority, self.priority_max)


#: who makes the call that the current task answers; None: not known, or no key is needed
CALLER: ContextVar[Principal | None] = ContextVar("CALLER", default=None)


def require(need: Need, model: str) -> None:
    """Check that the caller of the current task may do something with a model. Raises Failure(FORBIDDEN)."""
    principal = CALLER.get()
    if principal is not None:
        principal.require(need, model)


def shown(models: Iterable[str], need: Need = Need.DESCRIBE) -> list[str]:
    """Return those of the models' names that a reply to the caller of the current task may contain."""
    principal = CALLER.get()
    if principal is None or principal.sees_all(need):
        return list(models)
    return [model for model in models if principal.grants.allows(need, model)]


def owner_name() -> str:
    """Return the name of the API key of the caller of the current task, which owns what it uploads; "": it has none."""
    principal = CALLER.get()
    return principal.counters.name if principal is not None and principal.key_id else ""


def caller_name() -> str:
    """Return the name of the key of the caller of the current task; "": it has none."""
    principal = CALLER.get()
    return "" if principal is None else principal.counters.name
