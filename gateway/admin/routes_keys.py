"""The admin API for API keys and the audit log, with its documents."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Mapping
from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field, field_validator
from pydantic_core import PydanticCustomError

from millstream.gateway.access.principal import CALLER
from millstream.gateway.catalog.quotas import memory_taken
from millstream.gateway.http.body import read_document
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.services.access.audit_log import Wanted
from millstream.services.access.document import (
    GRACE_S,
    GRACE_S_MAX,
    NAME_PATTERN,
    PRIORITY_MAX,
    SCOPES_MAX,
    KeyDocument,
    Limits,
    StoredSecret,
)
from millstream.services.access.scopes import Need, check_scope
from millstream.services.access.secret import ID_BYTES, PREFIX, SALT_BYTES, format_key, hash_secret
from millstream.services.process.audit import audit
from millstream.services.process.threads import in_storage_thread

NAME_RULE = "a key's name has 1 to 64 letters (A-Z, a-z), digits, '.', '_' and '-', and begins with a letter or a digit"
EXPIRY_S_MAX = 100 * 365 * 24 * 3600.0


class _KeyFields(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    limits: Limits = Field(Limits(), description="Over all gateways.")
    priority_max: int | None = Field(
        None, ge=1, le=PRIORITY_MAX, description="Highest priority of its requests (1 is the highest)."
    )


class NewKey(_KeyFields):
    """A key to create."""

    name: str = Field(pattern=NAME_PATTERN, description="Unique among the live keys; metrics and logs show it.")
    scopes: list[str] = Field(
        min_length=1,
        max_length=SCOPES_MAX,
        description="`infer:<glob>`, `models:read:<glob>`, `models:write:<glob>` of model names (`models:read`, "
        "`models:write`: all), `metrics`, `shared-memory` or `admin`.",
    )
    expires_in_s: float | None = Field(None, gt=0, le=EXPIRY_S_MAX, description="Unset: it does not expire.")

    @field_validator("name", mode="before")
    @classmethod
    def _say_the_rule(cls, name: Any) -> Any:
        """Say which names there are, instead of showing the pattern."""
        if isinstance(name, str) and not re.fullmatch(NAME_PATTERN, name):
            raise PydanticCustomError("key_name", NAME_RULE)
        return name


class KeyChanges(_KeyFields):
    """What changes of a key. Fields that are left out keep their values, also within `limits`; null: none."""

    scopes: list[str] = Field([], min_length=1, max_length=SCOPES_MAX, description="In place of those before.")
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


class SecretState(BaseModel, from_attributes=True):
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


router = APIRouter(prefix="/admin/v1")

AUDIT_ENTRIES_MAX = 1000


@router.post(
    "/keys",
    status_code=201,
    summary="Create an API key; the reply shows it once",
    description="As soon as there is a key, every call needs one, except health and documentation.",
    responses=documented(400, 409, 413, 503, 507),
    openapi_extra=json_body(NewKey),  # no example: one click in /docs would close the server
)
async def create_key(request: Request, deps: DepsOf) -> KeyWithSecret:
    asked = await read_document(request, NewKey)
    for scope in asked.scopes:
        check_scope(scope)
    now, key_id = _now(), secrets.token_hex(ID_BYTES)
    secret, stored = await _new_secret(deps, key_id, now)
    document = KeyDocument(
        id=key_id,
        name=asked.name,
        scopes=tuple(asked.scopes),
        limits=asked.limits,
        priority_max=asked.priority_max,
        created_at=now,
        expires_at=None if asked.expires_in_s is None else now + asked.expires_in_s,
        secrets=(stored,),
    )
    await in_storage_thread(deps.keys.stored.add, document, now)
    audit("key created", key=f"{key_id} ({asked.name})", scopes=" ".join(asked.scopes))
    await deps.keys.announce()
    return _shown_once(deps, document, secret, now)


@router.get("/keys", summary="All API keys, without secrets", responses=documented(500))
async def list_keys(deps: DepsOf) -> Keys:
    stored, now = await asyncio.to_thread(deps.keys.stored.read), _now()
    taken = memory_taken(deps.catalog.snapshot)
    keys = [Key.model_validate(_fields(document, taken, now)) for document in stored.documents]
    return Keys(keys=keys, damaged=list(stored.damaged))


@router.get("/keys/{key}", summary="An API key by id or name, without secrets", responses=documented(404))
async def get_key(key: str, deps: DepsOf) -> Key:
    document = await asyncio.to_thread(deps.keys.stored.find, key)
    return _shown(deps, document, _now())


@router.post(
    "/keys/{key}/rotate",
    summary="Give an API key a new secret; the reply shows it once",
    description="The secret before is accepted for a while, so that clients can change over; an older one ends now. "
    "Scopes, limits and expiry stay, or are those that are given.",
    responses=documented(400, 404, 409, 413, 503, 507),
    openapi_extra=json_body(Rotation, required=False, example={"grace_s": 3600}),
)
async def rotate_key(key: str, request: Request, deps: DepsOf) -> KeyWithSecret:
    asked, now = await read_document(request, Rotation), _now()
    found = await asyncio.to_thread(deps.keys.stored.find, key)
    secret, stored = await _new_secret(deps, found.id, now)
    document = await in_storage_thread(
        deps.keys.stored.change,
        found.id,
        lambda document: document.rotated(stored, asked.grace_s).edited(asked.of(document, now)),
    )
    changed = ", ".join(sorted(asked.model_fields_set - {"grace_s"}))
    audit("key rotated", key=f"{document.id} ({document.name})", grace_s=asked.grace_s, changed=changed)
    await deps.keys.announce()
    return _shown_once(deps, document, secret, now)


@router.patch(
    "/keys/{key}",
    summary="Change an API key, which keeps its secret",
    description="Its scopes, limits, priority and expiry. When the reply comes, all gateways know them.",
    responses=documented(400, 404, 409, 413, 503, 507),
    openapi_extra=json_body(KeyChanges, example={"limits": {"requests_per_s": 50}}),
)
async def edit_key(key: str, request: Request, deps: DepsOf) -> Key:
    asked, now = await read_document(request, KeyChanges), _now()
    document = await in_storage_thread(
        deps.keys.stored.change, key, lambda document: document.edited(asked.of(document, now))
    )
    audit("key changed", key=f"{document.id} ({document.name})", changed=", ".join(sorted(asked.model_fields_set)))
    await deps.keys.announce()
    return _shown(deps, document, now)


@router.delete(
    "/keys/{key}",
    summary="Revoke an API key",
    description="When the reply comes, all gateways refuse it. Its document stays, so that calls go on needing a key.",
    responses=documented(400, 404, 409, 503, 507),
)
async def revoke_key(
    key: str,
    deps: DepsOf,
    forget: Annotated[
        bool,
        Query(
            description="Remove the document of a revoked or expired key, or a damaged document, by its id; without "
            "any document, no call needs a key."
        ),
    ] = False,
) -> Key | ForgottenKey:
    now = _now()
    if forget:
        forgotten = await in_storage_thread(deps.keys.stored.forget, key, now)
        if forgotten is None:
            audit("key forgotten", key=f"{key} (damaged)")
            await deps.keys.announce()
            return ForgottenKey(id=key, name=key)
        document = forgotten
    else:
        document = await in_storage_thread(deps.keys.stored.change, key, lambda document: document.revoked(now))
    audit("key forgotten" if forget else "key revoked", key=f"{document.id} ({document.name})")
    await deps.keys.announce()
    return _shown(deps, document, now)


@router.get(
    "/audit",
    summary="What was changed through the admin API, the newest last",
    description="Who, from where, what, and how it ended; of all gateways. The repository keeps a bounded number. "
    "A key without the scope `admin` is shown the entries about models that it may read.",
    responses=documented(400, 500),
)
async def get_audit(
    deps: DepsOf,
    limit: Annotated[int, Query(ge=1, le=AUDIT_ENTRIES_MAX, description="Most entries.")] = 100,
    key: Annotated[str | None, Query(description="Id or name of the key that made the calls.")] = None,
    model: Annotated[str | None, Query(description="Name of the model, with * and ? for any characters.")] = None,
    since: Annotated[float, Query(description="Seconds since the epoch.")] = -inf,
    until: Annotated[float, Query(description="Seconds since the epoch.")] = inf,
) -> AuditEntries:
    asked, caller = Wanted(key, model, since, until), CALLER.get()

    def wanted(entry: dict[str, Any]) -> bool:
        if caller is not None and not caller.grants.admin:
            about = entry.get("model")
            if not about or not caller.grants.allows(Need.READ, str(about)):
                return False
        return asked.matches(entry)

    return AuditEntries(entries=await asyncio.to_thread(deps.audit.newest, limit, wanted))


async def _new_secret(deps: Deps, key_id: str, now: float) -> tuple[str, StoredSecret]:
    """Return a new secret of a key, and what is stored of it."""
    await deps.keys.secret()
    salt = secrets.token_hex(SALT_BYTES)
    secret = deps.keys.derive(key_id, salt)
    return secret, StoredSecret(sha256=hash_secret(secret), salt=salt, created_at=now)


def _shown(deps: Deps, document: KeyDocument, now: float) -> Key:
    return Key.model_validate(_fields(document, memory_taken(deps.catalog.snapshot), now))


def _shown_once(deps: Deps, document: KeyDocument, secret: str, now: float) -> KeyWithSecret:
    new = {
        "key": format_key(document.id, secret),
        "aws_access_key_id": f"{PREFIX}{document.id}",
        "aws_secret_access_key": secret,
    }
    return KeyWithSecret.model_validate(_fields(document, memory_taken(deps.catalog.snapshot), now) | new)


def _fields(document: KeyDocument, taken: Mapping[str, int], now: float) -> dict[str, Any]:
    """Return the fields of Key. `taken`: by name of the key, what its models take."""
    held = [one for one in document.secrets if one.expires_at is None or one.expires_at > now]
    state, taken_bytes = document.ended(now) or "live", taken.get(document.name, 0)
    return dict(document) | {"state": state, "memory_taken_bytes": taken_bytes, "secrets": held}


def _now() -> float:
    return time.time()  # noqa: TID251 - expiries are instants for people
