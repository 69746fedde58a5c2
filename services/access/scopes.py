"""What a key may do, and what a call needs: a row of the authorisation table. Pure.

`infer:<glob>` runs and describes the models whose names match; `models:read:<glob>` reads all about them;
`models:write:<glob>` changes them, and reads; `models:read` and `models:write` are for all models. `models:code`
uploads what workers run as code, where `models:write` allows the upload, and with `models:network` what asks for the
network. `metrics`; `shared-memory` registers shared memory, and uses what the same key registered; `admin` does
everything.

A row is beside its route or method, in an Adapter (gateway/http/adapter.py) or in a GrpcService
(gateway/grpc/methods/service.py). A route without a row is refused; no method is without one.
tests/plugins/several/unit/test_access_table.py walks all of them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.names import NAME_CHARACTERS_MAX

SCOPES = (
    *("infer:<glob>", "models:read:<glob>", "models:write:<glob>", "models:code", "models:network", "metrics"),
    *("shared-memory", "admin"),
)
_INFER, _READ, _WRITE = "infer:", "models:read:", "models:write:"
#: scopes of one word that mean all models
_ALL = {"models:read": f"{_READ}*", "models:write": f"{_WRITE}*"}
_PLAIN = frozenset({"models:code", "models:network", "metrics", "shared-memory", "admin"})
#: characters of a glob, which bounds the time of a match
GLOB_CHARACTERS_MAX = 128
_GLOB = re.compile(r"[A-Za-z0-9._\-*?]+")


class Need(StrEnum):
    """What a call needs. A need for models is that of one model, or, of a list, that of any: it shows no others."""

    OPEN = "open"  # nothing: health, documentation
    INFER = "infer"
    DESCRIBE = "describe"  # to run, to read or to change the model
    READ = "models:read"
    WRITE = "models:write"
    METRICS = "metrics"
    MEMORY = "shared-memory"
    ADMIN = "admin"


Globs = tuple[re.Pattern[str], ...]


@dataclass(frozen=True, slots=True)
class Grants:
    """What the scopes of a key allow. What may be changed is in `read`, too."""

    infer: Globs = ()
    read: Globs = ()
    write: Globs = ()
    metrics: bool = False
    memory: bool = False
    admin: bool = False
    code: bool = False
    network: bool = False

    def infers(self, model: str) -> bool:
        """Whether it may run `model`."""
        return self.admin or _matches(self.infer, model)

    def allows(self, need: Need, model: str | None = None) -> bool:
        """Whether a call with this need is allowed.

        Args:
            need: what the call needs.
            model: the model that it names; None: it names none, or its name is not known yet. The call is then allowed
                if it would be for some model: a list shows those, and another model is checked when it is known.
        """
        if need is Need.OPEN or self.admin:
            return True
        if need is Need.METRICS or need is Need.MEMORY:
            return self.metrics if need is Need.METRICS else self.memory
        by_need = {Need.INFER: self.infer, Need.READ: self.read, Need.WRITE: self.write}
        globs = self.infer + self.read if need is Need.DESCRIBE else by_need.get(need, ())
        return bool(globs) if model is None else _matches(globs, model)


#: of the admin key, and of the token in the home
ALL = Grants(metrics=True, memory=True, admin=True)


def _matches(globs: Globs, model: str) -> bool:
    return len(model) <= NAME_CHARACTERS_MAX and any(glob.fullmatch(model) for glob in globs)


def check_scope(scope: str) -> str:
    """Return `scope`. Raises Failure(INVALID) if there is no such scope."""
    prefix = next((prefix for prefix in (_INFER, _READ, _WRITE) if scope.startswith(prefix)), None)
    if prefix is not None:
        glob = scope.removeprefix(prefix)
        if len(glob) > GLOB_CHARACTERS_MAX or not _GLOB.fullmatch(glob):
            raise invalid(
                f"scope '{scope[:GLOB_CHARACTERS_MAX]}': after '{prefix}' comes a model's name, with * and ? for any "
                f"characters, of at most {GLOB_CHARACTERS_MAX} characters"
            )
    elif scope not in _PLAIN and scope not in _ALL:
        raise invalid(f"'{scope[:GLOB_CHARACTERS_MAX]}' is no scope: use {', '.join(SCOPES)}")
    return scope


def grants_of(scopes: Iterable[str]) -> Grants:
    """Return what the scopes allow. Raises Failure(INVALID) if there is no such scope."""
    checked = [_ALL.get(scope, scope) for scope in map(check_scope, scopes)]

    def globs(prefix: str) -> Globs:
        found = [scope.removeprefix(prefix) for scope in checked if scope.startswith(prefix)]
        return tuple(re.compile(fnmatch.translate(glob)) for glob in found)

    write = globs(_WRITE)
    return Grants(
        infer=globs(_INFER),
        read=globs(_READ) + write,
        write=write,
        metrics="metrics" in checked,
        memory="shared-memory" in checked,
        admin="admin" in checked,
        code="models:code" in checked,
        network="models:network" in checked,
    )


class Row(NamedTuple):
    """What a call needs.

    Args:
        need: the need.
        model: the path parameter, or the field of the gRPC message (`a.b`: b of a), that names the model; None: the
            call names none there. Calls that run a model check its name again when they find it.
        changes: whether the call changes something, so that the audit log has it.
        admin: whether it is one of the admin API, which is never open.
        of_message: returns what a gRPC message needs, where that depends on its fields.
    """

    need: Need
    model: str | None = None
    changes: bool = False
    admin: bool = False
    of_message: Callable[[Any], Need] | None = None

    @property
    def controls(self) -> bool:
        """Whether it changes the server or touches its memory: open without keys only where a setting says so."""
        return self.changes or self.need is Need.MEMORY

    @property
    def keyless(self) -> bool:
        """Whether anybody may make the call while no key exists."""
        return not (self.admin or self.controls)

    def for_message(self, message: Any) -> Row:
        """Return the row of a call whose gRPC message has been read."""
        if self.of_message is None:
            return self
        need = self.of_message(message)
        return self._replace(need=need, changes=need in {Need.WRITE, Need.ADMIN}, of_message=None)


#: what calls of routes need, by method and template of the path
Rows = Mapping[tuple[str, str], Row]
#: of a list of models, which shows those that the caller may describe
LIST = Row(Need.DESCRIBE)
