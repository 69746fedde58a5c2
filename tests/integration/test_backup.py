"""docs/operations.md: its commands back up a repository in use; the copy is served elsewhere, with the same answers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.load import constant_load
from tests.kit.stack import Stack, running_stack

PAGE = Path(__file__).parents[2] / "docs/operations.md"
X = np.arange(4, dtype=np.float32).reshape(2, 2)
BODY = v2.request({"x": X})


def command(start: str) -> str:
    """Return the line of the page that begins with these words."""
    found = re.search(rf"^{re.escape(start)}.*$", PAGE.read_text(), flags=re.MULTILINE)
    assert found is not None
    return found[0]


def signed(key: str) -> tuple[bytes, dict[str, str]]:
    """The request with a key."""
    return BODY[0], {**BODY[1], "Authorization": f"Bearer {key}"}


def answer(stack: Stack, path: str) -> np.ndarray:
    reply = stack.http.post(f"/v2/models/shop{path}/infer", content=BODY[0], headers=BODY[1])
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, reply.headers)["y"]


def test_a_backup_of_a_running_repository_is_served_elsewhere(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with running_stack(first) as stack:
        stack.push("shop", models.scale(tmp_path / "1.onnx", factor=2.0), version=1)
        stack.push("shop", models.scale(tmp_path / "2.onnx", factor=3.0), version=2, activate=False)
        Millstream(stack.home).ok("configure", "shop", "--idle-s", "3600")
        expected = {path: answer(stack, path) for path in ("", "/versions/1", "/versions/2")}
        settings = stack.http.get("/admin/v1/models/shop/settings").json()
        (stack.home / "repository/.staging/unfinished").mkdir(parents=True)
        admin = Millstream(stack.home).json("keys", "create", "ops", "--scope", "admin")
        caller = Millstream(stack.home, admin["key"]).json("keys", "create", "app", "--scope", "infer:shop")
        stack.headers["Authorization"] = f"Bearer {caller['key']}"
        with constant_load(stack.port, "/v2/models/shop/infer", [signed(caller["key"])], callers=2) as load:
            load.more(20)
            backup = command("tar -C .millstream").replace("-C .millstream", f"-C {stack.home}")
            backup = re.sub(r"\S+\.tar\.gz", str(tmp_path / "backup.tar.gz"), backup.replace("$(date +%F)", "DATE"))
            done = subprocess.run(["bash", "-c", backup], capture_output=True, text=True, check=False)
            assert done.returncode in {0, 1}, done.stderr  # 1: a file changed while it was read
            load.more(20)
        assert all(reply.status == 200 for reply in load.answers)
        (stack.home / "repository/.staging/unfinished").rmdir()
    restore = command("mkdir -p restored").replace("restored", str(second / "home"))
    restore = re.sub(r"\S+\.tar\.gz", str(tmp_path / "backup.tar.gz"), restore)
    subprocess.run(["bash", "-c", restore], check=True)
    assert not (second / "home/repository/.staging").exists()
    with running_stack(second) as stack:
        stack.headers["Authorization"] = f"Bearer {admin['key']}"
        stack.settled("shop", 1)
        for path, values in expected.items():
            reply = stack.http.post(f"/v2/models/shop{path}/infer", content=BODY[0], headers=signed(caller["key"])[1])
            np.testing.assert_array_equal(v2.outputs(reply.content, reply.headers)["y"], values)
        assert stack.http.get("/admin/v1/models/shop/settings").json() == settings
        wrong = signed(caller["key"][:-1])
        assert stack.http.post("/v2/models/shop/infer", content=wrong[0], headers=wrong[1]).status_code == 401
        assert not np.array_equal(expected[""], expected["/versions/2"]), "activation was kept, not the newest version"
