"""Versions that serve nothing are not loaded at a start: their first call loads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

VERSIONS = range(1, 11)
ACTIVE = 9
NEWEST = 10


def answer(stack: Stack, version: int | None = None) -> float:
    """Return the factor by which a version multiplies; None: the one that answers for the name."""
    path = "/v2/models/m" if version is None else f"/v2/models/m/versions/{version}"
    body, headers = v2.request({"x": np.ones((1, 2), np.float32)})
    reply = stack.http.post(f"{path}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return float(v2.outputs(reply.content, reply.headers)["y"][0, 0])


def states(stack: Stack) -> dict[int, str]:
    listed = stack.http.get("/admin/v1/models/m").json()["versions"]
    return {one["version"]: one["state"] for one in listed}


def test_after_a_start_only_the_active_and_the_newest_version_are_loaded(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        for version in VERSIONS:
            path = models.scale(tmp_path / "m.onnx", factor=float(version))
            stack.push("m", path, version=version, activate=version <= ACTIVE)
            assert answer(stack) == min(version, ACTIVE)
            assert answer(stack, version) == version, "it answers before it is activated"
    with running_stack(tmp_path) as stack:
        expected = {version: "ready" if version in (ACTIVE, NEWEST) else "standby" for version in VERSIONS}
        wait_until(lambda: states(stack) == expected, what=f"{expected}")
        assert answer(stack) == ACTIVE
        assert states(stack) == expected
        assert all(stack.http.get(f"/v2/models/m/versions/{version}/ready").is_success for version in VERSIONS)
        index = stack.http.post("/v2/repository/index", json={}).json()
        assert {one["state"] for one in index if one["name"] == "m"} == {"READY"}
        assert answer(stack, 3) == 3
        wait_until(lambda: states(stack) == expected | {3: "ready"}, what="the version that was called is loaded")
        reply = stack.http.post("/admin/v1/models/m/versions/4/activate")
        assert reply.is_success, reply.text
        assert answer(stack) in (ACTIVE, 4)
        wait_until(lambda: answer(stack) == 4, what="the activated version answers")
