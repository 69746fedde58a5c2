"""Log records about what an operator changes, with who did it.

check of the key ─> acting ─> … ─> audit("deleted", model) ─┬─> millstream.admin: deleted: MODEL (by admin key, IP)
                                                            └─> CHANGES, for the audit log
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from millstream.services.errors import Failure
from millstream.services.process.logs import about

log = logging.getLogger("millstream.admin")

#: who makes the change that the current task works on
_ACTOR: ContextVar[str] = ContextVar("actor", default="unknown")
#: the same without an address, if it has a key
_CALLER: ContextVar[str] = ContextVar("caller", default="unknown")
CHANGES_MAX = 32  # of one call; further ones are only in the log


class Changes:
    """What a call has changed. `model`: that it is about; "": none, or several."""

    __slots__ = ("model", "texts")

    def __init__(self) -> None:
        self.model = ""
        self.texts: list[str] = []


#: of the call that the current task answers; None: nothing collects it
CHANGES: ContextVar[Changes | None] = ContextVar("changes", default=None)


def acting(address: str, label: str = "") -> None:
    """Set who makes the changes of the current task: a caller at `address`. `label`: of its key; "": it has none."""
    _ACTOR.set(f"{label}, {address}" if label else address)
    _CALLER.set(label or address)


def caller() -> str:
    """Return for whom the current task works, wherever the call came from: the label of a key, else an address."""
    return _CALLER.get()


def audit(change: str, model: str | None = None, **fields: object) -> None:
    """Log that a change was made. `fields`: values for programs that read logs; people are shown those that are set."""
    actor = _ACTOR.get()
    subject = "" if model is None else f": {model}"
    details = "".join(f", {name} {value}" for name, value in fields.items() if value != "")
    changes = CHANGES.get()
    if changes is not None and len(changes.texts) < CHANGES_MAX:
        changes.texts.append(f"{change}{subject}{details}")
    concerns(model or "")
    log.info("%s%s%s (by %s)", change, subject, details, actor, extra=about(model, by=actor, change=change, **fields))


def concerns(model: str) -> None:
    """Note which model the call of the current task is about; "": it is not known."""
    changes = CHANGES.get()
    if changes is not None and model:
        changes.model = model


@contextmanager
def audited(change: str, model: str, **fields: object) -> Iterator[None]:
    """Log why a change was not made, if the block raises."""
    try:
        yield
    except Failure as failure:
        values = about(model, by=_ACTOR.get(), change=change, code=failure.code.value, **fields)
        log.warning("%s failed: %s: %s (by %s)", change, model, failure.message, _ACTOR.get(), extra=values)
        raise
    except BaseException as error:
        values = about(model, by=_ACTOR.get(), change=change, **fields)
        log.warning("%s ended early: %s: %s (by %s)", change, model, type(error).__name__, _ACTOR.get(), extra=values)
        raise
