"""scopes: what a key may do, and what a call needs. Pure.

`infer:<glob>` runs and describes the models whose names match; `models:read`; `models:write` (and read); `metrics`;
`shared-memory` registers shared memory, and uses what the same key registered; `admin` does everything.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from millstream.services.errors import invalid
from millstream.services.model.names import NAME_CHARACTERS_MAX

INFER = "infer:"
SCOPES = ("infer:<glob>", "models:read", "models:write", "metrics", "shared-memory", "admin")
#: characters of a glob, which bounds the time of a match
GLOB_CHARACTERS_MAX = 128
_GLOB = re.compile(r"[A-Za-z0-9._\-*?]+")


class Need(StrEnum):
    """What a call needs."""

    OPEN = "open"  # nothing: health, documentation
    INFER = "infer"  # to run the model that it names
    DESCRIBE = "describe"  # to run the model that it names, or to read models
    READ = "models:read"
    WRITE = "models:write"
    METRICS = "metrics"
    MEMORY = "shared-memory"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Grants:
    """What the scopes of a key allow."""

    globs: tuple[re.Pattern[str], ...] = ()
    read: bool = False
    write: bool = False
    metrics: bool = False
    memory: bool = False
    admin: bool = False

    def infers(self, model: str) -> bool:
        """Whether it may run `model`."""
        if self.admin:
            return True
        return len(model) <= NAME_CHARACTERS_MAX and any(glob.fullmatch(model) for glob in self.globs)

    def allows(self, need: Need, model: str | None = None) -> bool:
        """Whether a call with this need is allowed.

        Args:
            need: what the call needs.
            model: the model that it names; None: it names none, or its name is not known yet. A call that runs a model
                is then allowed if some name would be: its model is checked when it is known.
        """
        if need is Need.OPEN or self.admin:
            return True
        if need is Need.INFER:
            return bool(self.globs) if model is None else self.infers(model)
        if need is Need.DESCRIBE:
            return self.read or (model is not None and self.infers(model))
        granted = {
            Need.READ: self.read,
            Need.WRITE: self.write,
            Need.METRICS: self.metrics,
            Need.MEMORY: self.memory,
        }
        return granted.get(need, False)

    def may(self, need: Need) -> bool:
        """Whether a call with this need would be allowed for some model."""
        return self.allows(need) or (need in {Need.INFER, Need.DESCRIBE} and bool(self.globs))


#: of the admin key, and of callers on this machine while there is no key with the scope admin
ALL = Grants(read=True, write=True, metrics=True, memory=True, admin=True)


def check_scope(scope: str) -> str:
    """Return `scope`. Raises Failure(INVALID) if there is no such scope."""
    glob = scope.removeprefix(INFER)
    if scope.startswith(INFER):
        if len(glob) > GLOB_CHARACTERS_MAX or not _GLOB.fullmatch(glob):
            raise invalid(
                f"scope '{scope[:GLOB_CHARACTERS_MAX]}': after 'infer:' comes a model's name, with * and ? for any "
                f"characters, of at most {GLOB_CHARACTERS_MAX} characters"
            )
    elif scope not in SCOPES:
        raise invalid(f"'{scope[:GLOB_CHARACTERS_MAX]}' is no scope: use {', '.join(SCOPES)}")
    return scope


def grants_of(scopes: Iterable[str]) -> Grants:
    """Return what the scopes allow. Raises Failure(INVALID) if there is no such scope."""
    checked = [check_scope(scope) for scope in scopes]
    write = "models:write" in checked
    return Grants(
        tuple(re.compile(fnmatch.translate(one.removeprefix(INFER))) for one in checked if one.startswith(INFER)),
        read=write or "models:read" in checked,
        write=write,
        metrics="metrics" in checked,
        memory="shared-memory" in checked,
        admin="admin" in checked,
    )
