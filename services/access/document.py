"""A key as the repository stores it, and how it changes: edit, rotate, revoke. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from millstream.services.access.scopes import check_scope
from millstream.services.errors import Code, Failure

SCOPES_MAX = 64
SECRETS_MAX = 2  # live secrets of a key: the new one, and the one before for a while
GRACE_S = 24 * 3600.0  # time for which a rotated secret is still accepted, unless asked otherwise
GRACE_S_MAX = 30 * 24 * 3600.0
FORMAT = 1  # of a document; a newer one may restrict a key in a way that this release does not know
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PRIORITY_MAX = 1_000_000


class Limits(BaseModel):
    """The limits of a key, over all gateways; null: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    requests_per_s: float | None = Field(None, gt=0, le=1e9, description="Calls a second, of every kind.")
    concurrency: int | None = Field(None, gt=0, le=1_000_000, description="Calls at the same time.")
    rows_per_s: float | None = Field(None, gt=0, le=1e9, description="Rows of inference requests a second.")
    compute_s_per_minute: float | None = Field(
        None, gt=0, le=1e6, description="Seconds a minute that runs of models take, as measured."
    )

    models: int | None = Field(None, gt=0, le=1_000_000, description="Models that it owns.")
    disk_bytes: int | None = Field(None, gt=0, le=1 << 50, description="Bytes of all files of the models that it owns.")
    uploads: int | None = Field(None, gt=0, le=1000, description="Uploads, with their imports, at the same time.")
    memory_bytes: int | None = Field(
        None,
        gt=0,
        le=1 << 50,
        description="Bytes of memory that instances of the models that it owns may take in all workers together.",
    )

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self != Limits()


class StoredSecret(BaseModel):
    """What is stored of a secret. `expires_at`: when it ends, because it was rotated; None: with the key."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    salt: str
    created_at: float
    expires_at: float | None = None


class KeyDocument(BaseModel):
    """A key. Instants are seconds since the epoch.

    Args:
        generation: grows with each change, so that two changes at the same time are noticed.
        priority_max: the highest priority that requests of the key get (1 is the highest); None: any.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = Field(FORMAT, ge=1, le=FORMAT)
    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    name: str = Field(pattern=NAME_PATTERN)
    generation: int = 1
    scopes: tuple[str, ...] = Field(min_length=1, max_length=SCOPES_MAX)
    limits: Limits = Limits()
    priority_max: int | None = Field(None, ge=1, le=PRIORITY_MAX)
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    secrets: tuple[StoredSecret, ...] = Field(max_length=SECRETS_MAX)

    @field_validator("scopes")
    @classmethod
    def _known(cls, scopes: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(check_scope(scope) for scope in scopes)
        except Failure as failure:
            raise ValueError(failure.message) from failure

    @model_validator(mode="after")
    def _has_secrets(self) -> Self:
        if self.revoked_at is None and not self.secrets:
            raise ValueError("a key that was not revoked has a secret")
        return self

    def ended(self, now: float) -> str | None:
        """Return how the key ended: revoked or expired; None while it is live."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else None

    def rotated(self, secret: StoredSecret, grace_s: float) -> KeyDocument:
        """Return the key with a new secret. The one before ends after `grace_s`; an older one ends at once."""
        now = secret.created_at
        self._check_live(now)
        until = now + grace_s
        newest = self.secrets[-1]
        if newest.expires_at is not None:
            until = min(until, newest.expires_at)
        before = () if grace_s <= 0 else (newest.model_copy(update={"expires_at": until}),)
        return self._changed(secrets=(*before, secret))

    def edited(self, changes: Mapping[str, Any]) -> KeyDocument:
        """Return the key with other scopes, limits, priority or expiry, and the same secrets.

        Raises Failure: CONFLICT (it was revoked), INVALID (no such scope).
        """
        if self.revoked_at is not None:
            raise Failure(Code.CONFLICT, f"key '{self.name}' has been revoked: make another")
        for scope in changes.get("scopes", ()):
            check_scope(scope)
        return self._changed(**changes) if changes else self

    def revoked(self, now: float) -> KeyDocument:
        """Return the key without a secret. The document stays, so that the name of the key remains known."""
        return self if self.revoked_at is not None else self._changed(revoked_at=now, secrets=())

    def _check_live(self, now: float) -> None:
        if ended := self.ended(now):
            raise Failure(Code.CONFLICT, f"key '{self.name}' has {'been ' * (ended == 'revoked')}{ended}: make another")

    def _changed(self, **fields: Any) -> KeyDocument:
        return self.model_copy(update={"generation": self.generation + 1, **fields})


def memory_quotas(documents: Iterable[KeyDocument]) -> dict[str, int]:
    """Return the names of keys with a memory quota, and its bytes: of a name, the newest key that was not revoked.

    `documents`: ordered by creation.
    """
    newest = {one.name: one.limits.memory_bytes for one in documents if one.revoked_at is None}
    return {name: size_bytes for name, size_bytes in newest.items() if size_bytes is not None}
