"""schemas_keys: bodies of the admin API for API keys and the audit log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from millstream.services.access.document import (
    GRACE_S,
    GRACE_S_MAX,
    NAME_PATTERN,
    PRIORITY_MAX,
    SCOPES_MAX,
    KeyDocument,
    Limits,
)

NAME_RULE = "a key's name has 1 to 64 letters (A-Z, a-z), digits, '.', '_' and '-', and begins with a letter or a digit"
EXPIRY_S_MAX = 100 * 365 * 24 * 3600.0


class NewKey(BaseModel):
    """A key to create."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=NAME_PATTERN, description="Unique among the live keys; metrics and logs show it.")
    scopes: list[str] = Field(
        min_length=1,
        max_length=SCOPES_MAX,
        description="`infer:<glob>`, `models:read:<glob>`, `models:write:<glob>` of model names (`models:read`, "
        "`models:write`: all), `metrics`, `shared-memory` or `admin`.",
    )
    limits: Limits = Field(Limits(), description="Over all gateways.")
    priority_max: int | None = Field(
        None, ge=1, le=PRIORITY_MAX, description="Highest priority of its requests (1 is the highest)."
    )
    expires_in_s: float | None = Field(None, gt=0, le=EXPIRY_S_MAX, description="Unset: it does not expire.")

    @field_validator("name", mode="before")
    @classmethod
    def _say_the_rule(cls, name: Any) -> Any:
        """Say which names there are, instead of showing the pattern."""
        if isinstance(name, str) and not re.fullmatch(NAME_PATTERN, name):
            raise PydanticCustomError("key_name", NAME_RULE)
        return name


class KeyChanges(BaseModel):
    """What changes of a key. Fields that are left out keep their values, also within `limits`; null: none."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    scopes: list[str] = Field([], min_length=1, max_length=SCOPES_MAX, description="In place of those before.")
    limits: Limits = Field(Limits(), description="Over all gateways.")
    priority_max: int | None = Field(
        None, ge=1, le=PRIORITY_MAX, description="Highest priority of its requests (1 is the highest)."
    )
    expires_in_s: float | None = Field(
        None, gt=0, le=EXPIRY_S_MAX, description="From now on; null: it does not expire."
    )

    def of(self, document: KeyDocument, now: float) -> dict[str, Any]:
        """Return the fields of the key's document that change."""
        given: dict[str, Any] = {}
        if "scopes" in self.model_fields_set:
            given["scopes"] = tuple(self.scopes)
        if "limits" in self.model_fields_set:
            given["limits"] = document.limits.model_copy(update=self.limits.model_dump(exclude_unset=True))
        if "priority_max" in self.model_fields_set:
            given["priority_max"] = self.priority_max
        if "expires_in_s" in self.model_fields_set:
            given["expires_at"] = None if self.expires_in_s is None else now + self.expires_in_s
        return given


class Rotation(KeyChanges):
    """How a key is rotated, and what else changes of it."""

    grace_s: float = Field(
        GRACE_S, ge=0, le=GRACE_S_MAX, description="Seconds for which the secret before is accepted, too."
    )


class SecretState(BaseModel):
    """A secret of a key, without the secret."""

    created_at: float
    expires_at: float | None


class Key(BaseModel):
    """A key without its secrets. Instants are seconds since the epoch."""

    id: str
    name: str
    generation: int
    scopes: list[str]
    limits: Limits
    priority_max: int | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    state: str = Field(description="live, expired or revoked")
    memory_taken_bytes: int = Field(description="Memory that the models that it owns take in all workers, as measured.")
    secrets: list[SecretState]


class ForgottenKey(BaseModel):
    """A key whose damaged document was removed: nothing but its id is known."""

    id: str
    name: str
    state: str = "forgotten"


class KeyWithSecret(Key):
    """A key with its new secret, which is shown once."""

    key: str = Field(description="`mr_<id>_<secret>`, for `Authorization: Bearer` or `X-API-Key`.")
    aws_access_key_id: str = Field(description="The same for clients of AWS, which sign with it.")
    aws_secret_access_key: str


class Keys(BaseModel):
    """All keys, ordered by creation. `damaged`: ids of documents that cannot be read; such keys are refused."""

    keys: list[Key]
    damaged: list[str]


class AuditEntries(BaseModel):
    """Changes, the newest last."""

    entries: list[dict[str, Any]]


def key_of(document: KeyDocument, taken: Mapping[str, int], now: float) -> dict[str, Any]:
    """Return the fields of Key. `taken`: by name of the key, what its models take."""
    return {
        **document.model_dump(include=set(Key.model_fields) - {"state", "memory_taken_bytes", "secrets"}),
        "state": document.ended(now) or "live",
        "memory_taken_bytes": taken.get(document.name, 0),
        "secrets": [
            {"created_at": stored.created_at, "expires_at": stored.expires_at}
            for stored in document.secrets
            if stored.expires_at is None or stored.expires_at > now
        ],
    }
