"""routes_keys: the admin API for API keys, and for the audit log."""

from __future__ import annotations

import asyncio
import secrets
import time
from math import inf
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from millstream.gateway.access.principal import CALLER
from millstream.gateway.admin import schemas_keys as schemas
from millstream.gateway.catalog.quotas import memory_taken
from millstream.gateway.http.body import read_document
from millstream.gateway.http.context import DepsOf
from millstream.gateway.http.deps import Deps
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.services.access.audit_rules import Wanted
from millstream.services.access.document import KeyDocument, StoredSecret
from millstream.services.access.scopes import Need, check_scope
from millstream.services.access.secret import ID_BYTES, PREFIX, SALT_BYTES, format_key, hash_secret
from millstream.services.process.audit import audit
from millstream.services.process.storage_threads import in_storage_thread

router = APIRouter(prefix="/admin/v1")

AUDIT_ENTRIES_MAX = 1000


@router.post(
    "/keys",
    status_code=201,
    summary="Create an API key; the reply shows it once",
    description="As soon as there is a key, every call needs one, except health and documentation.",
    responses=documented(400, 409, 413, 503, 507),
    openapi_extra=json_body(schemas.NewKey),  # no example: one click in /docs would close the server
)
async def create_key(request: Request, deps: DepsOf) -> schemas.KeyWithSecret:
    asked = await read_document(request, schemas.NewKey)
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
async def list_keys(deps: DepsOf) -> schemas.Keys:
    stored, now = await asyncio.to_thread(deps.keys.stored.read), _now()
    taken = memory_taken(deps.catalog.snapshot)
    keys = [schemas.Key.model_validate(schemas.key_of(document, taken, now)) for document in stored.documents]
    return schemas.Keys(keys=keys, damaged=list(stored.damaged))


@router.get("/keys/{key}", summary="An API key by id or name, without secrets", responses=documented(404))
async def get_key(key: str, deps: DepsOf) -> schemas.Key:
    document = await asyncio.to_thread(deps.keys.stored.find, key)
    return _shown(deps, document, _now())


@router.post(
    "/keys/{key}/rotate",
    summary="Give an API key a new secret; the reply shows it once",
    description="The secret before is accepted for a while, so that clients can change over; an older one ends now. "
    "Scopes, limits and expiry stay, or are those that are given.",
    responses=documented(400, 404, 409, 413, 503, 507),
    openapi_extra=json_body(schemas.Rotation, required=False, example={"grace_s": 3600}),
)
async def rotate_key(key: str, request: Request, deps: DepsOf) -> schemas.KeyWithSecret:
    asked, now = await read_document(request, schemas.Rotation), _now()
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
    openapi_extra=json_body(schemas.KeyChanges, example={"limits": {"requests_per_s": 50}}),
)
async def edit_key(key: str, request: Request, deps: DepsOf) -> schemas.Key:
    asked, now = await read_document(request, schemas.KeyChanges), _now()
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
) -> schemas.Key | schemas.ForgottenKey:
    now = _now()
    if forget:
        forgotten = await in_storage_thread(deps.keys.stored.forget, key, now)
        if forgotten is None:
            audit("key forgotten", key=f"{key} (damaged)")
            await deps.keys.announce()
            return schemas.ForgottenKey(id=key, name=key)
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
) -> schemas.AuditEntries:
    asked, caller = Wanted(key, model, since, until), CALLER.get()

    def wanted(entry: dict[str, Any]) -> bool:
        if caller is not None and not caller.grants.admin:
            about = entry.get("model")
            if not about or not caller.grants.allows(Need.READ, str(about)):
                return False
        return asked.matches(entry)

    return schemas.AuditEntries(entries=await asyncio.to_thread(deps.audit.newest, limit, wanted))


async def _new_secret(deps: Deps, key_id: str, now: float) -> tuple[str, StoredSecret]:
    """Return a new secret of a key, and what is stored of it."""
    await deps.keys.secret()
    salt = secrets.token_hex(SALT_BYTES)
    secret = deps.keys.derive(key_id, salt)
    return secret, StoredSecret(sha256=hash_secret(secret), salt=salt, created_at=now)


def _shown(deps: Deps, document: KeyDocument, now: float) -> schemas.Key:
    return schemas.Key.model_validate(schemas.key_of(document, memory_taken(deps.catalog.snapshot), now))


def _shown_once(deps: Deps, document: KeyDocument, secret: str, now: float) -> schemas.KeyWithSecret:
    return schemas.KeyWithSecret.model_validate(
        {
            **schemas.key_of(document, memory_taken(deps.catalog.snapshot), now),
            "key": format_key(document.id, secret),
            "aws_access_key_id": f"{PREFIX}{document.id}",
            "aws_secret_access_key": secret,
        }
    )


def _now() -> float:
    return time.time()  # noqa: TID251 - expiries are instants for people
