"""A key is changed without a new secret, and a rotation keeps or takes what is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kit.application import Application

pytestmark = pytest.mark.anyio

KEYS = "/admin/v1/keys"
NEW = {"name": "team", "scopes": ["infer:a"], "limits": {"requests_per_s": 5, "concurrency": 2}, "expires_in_s": 60}


@pytest.mark.plugins
async def test_an_edit_changes_what_is_given_and_keeps_the_secret(tmp_path: Path) -> None:
    async with Application(tmp_path).client() as client:
        made = (await client.post(KEYS, json=NEW)).json()
        theirs = {"authorization": f"Bearer {made['key']}"}
        assert (await client.get("/v2/models", headers=theirs)).status_code == 200
        assert (await client.get("/admin/v1/models", headers=theirs)).status_code == 403

        async def edited(**changes: Any) -> dict[str, Any]:
            reply = await client.patch(f"{KEYS}/team", json=changes)
            assert reply.status_code == 200, reply.text
            document: dict[str, Any] = reply.json()
            return document

        found = await edited(scopes=["infer:a", "models:read:a"])
        assert (found["scopes"], found["limits"]["requests_per_s"]) == (["infer:a", "models:read:a"], 5)
        assert found["secrets"] == made["secrets"]
        assert (await client.get("/admin/v1/models", headers=theirs)).status_code == 200
        found = await edited(limits={"requests_per_s": None, "rows_per_s": 7})
        limits = {name: value for name, value in found["limits"].items() if value is not None}
        assert (limits, found["expires_at"]) == ({"rows_per_s": 7, "concurrency": 2}, made["expires_at"])
        assert (await edited(expires_in_s=None))["expires_at"] is None
        assert (await edited(expires_in_s=3600))["expires_at"] > made["expires_at"]
        assert await edited() == await edited()
        mistakes: list[Any] = [
            {"scopes": []},
            {"scopes": ["nonsense"]},
            {"scope": ["admin"]},
            {"limits": {"rows_per_s": 0}},
        ]
        for wrong in mistakes:
            assert (await client.patch(f"{KEYS}/team", json=wrong)).status_code == 400
        await edited(scopes=["models:read:b"])
        assert (await client.post("/v2/models/a/generate", headers=theirs, content=b"{}")).status_code == 403
        await client.delete(f"{KEYS}/team")
        assert (await client.patch(f"{KEYS}/team", json={})).status_code == 409
        assert (await client.patch(f"{KEYS}/nobody", json={})).status_code == 404


async def test_a_rotation_takes_what_is_given_and_keeps_the_rest(tmp_path: Path) -> None:
    async with Application(tmp_path).client() as client:
        made = (await client.post(KEYS, json=NEW)).json()
        kept = (await client.post(f"{KEYS}/team/rotate")).json()
        assert kept["key"] != made["key"]
        assert {name: kept[name] for name in ("scopes", "limits", "expires_at")} == {
            name: made[name] for name in ("scopes", "limits", "expires_at")
        }
        changes = {"grace_s": 0, "scopes": ["models:write:a"], "limits": {"concurrency": None}, "expires_in_s": None}
        taken = (await client.post(f"{KEYS}/team/rotate", json=changes)).json()
        assert (taken["scopes"], taken["expires_at"], taken["limits"]["concurrency"]) == (
            ["models:write:a"],
            None,
            None,
        )
        assert taken["limits"]["requests_per_s"] == 5
        old, new = ({"authorization": f"Bearer {key['key']}"} for key in (kept, taken))
        assert (await client.get("/admin/v1/models", headers=old)).status_code == 401
        assert (await client.get("/admin/v1/models", headers=new)).status_code == 200
        assert (await client.post(f"{KEYS}/team/rotate", json={"rate": 1})).status_code == 400


async def test_the_audit_log_is_filtered_by_key_model_and_time(tmp_path: Path) -> None:
    async with Application(tmp_path).client() as client:
        made = (await client.post(KEYS, json=NEW | {"scopes": ["models:write:a*"]})).json()
        theirs = {"authorization": f"Bearer {made['key']}"}
        for name in ("a1", "a2", "b"):
            await client.delete(f"/admin/v1/models/{name}")
        await client.delete("/admin/v1/models/a1", headers=theirs)

        async def found(headers: dict[str, str] | None = None, **asked: Any) -> list[tuple[str, str]]:
            reply = await client.get("/admin/v1/audit", params=asked, headers=headers)
            assert reply.status_code == 200, reply.text
            return [(entry["model"], entry["key"]) for entry in reply.json()["entries"]]

        key_id = made["id"]
        assert await found() == [("", ""), ("a1", ""), ("a2", ""), ("b", ""), ("a1", key_id)]
        assert await found(key="team") == await found(key=key_id) == [("a1", key_id)]
        assert await found(model="a*") == [("a1", ""), ("a2", ""), ("a1", key_id)]
        assert await found(model="b", since=1.0, until=4e9) == [("b", "")]
        assert await found(until=1.0) == await found(since=4e9) == []
        assert await found(theirs) == [("a1", ""), ("a2", ""), ("a1", key_id)]
        assert await found(theirs, model="b") == []
        assert await found(limit=1, model="a1") == [("a1", key_id)]
