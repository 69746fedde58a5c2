"""What is shown of a function: its packages and how they were built, its code, its last errors; and to whom."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.functions.gateway.function_page import CODE_BYTES_MAX
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until
from tests.plugins.functions.unit.test_environments import wheel

#: what is text in JSON, a terminal and a page, and not UTF-8
HOSTILE = b"""# </script><img src=x onerror=alert(1)> \x1b[31m \xff
import greeting


def predict(text: str) -> str:
    if text == "fail":
        raise ValueError(f"<b>{text}</b> \\x1b[31m" + "x" * 2000)
    return greeting.of(text)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("page")
    with running_stack(folder, pools="cpu=1") as stack:
        yield stack


def push(stack: Stack, folder: Path, source: bytes) -> None:
    """Push a function with a folder of wheels, as an archive."""
    (folder / "service.py").write_bytes(source)
    wheel(folder / "wheels", "1.5")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for path in folder.rglob("*"):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    reply = stack.http.post(
        "/admin/v1/models/hello/versions", params={"wait": 60}, content=content.getvalue(), headers={"Accept": "*/*"}
    )
    assert reply.status_code in {200, 201}, reply.text


def infer(stack: Stack, text: str) -> Any:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    return stack.http.post("/v2/models/hello/infer", json=body)


def key(stack: Stack, name: str, *scopes: str) -> dict[str, str]:
    reply = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes})
    return {"Authorization": f"Bearer {reply.json()['key']}"}


def test_a_function_is_shown_to_those_who_may_see_it(stack: Stack, tmp_path: Path) -> None:
    push(stack, tmp_path, b"# /// script\n# dependencies = ['greeting>=1']\n# ///\n" + HOSTILE.replace(b"\xff", b""))
    assert infer(stack, "you").json()["outputs"][0]["data"] == ["hello you, 1.5"]
    for _ in range(3):
        assert infer(stack, "fail").status_code == 500

    def shown(headers: dict[str, str]) -> dict[str, Any]:
        version: dict[str, Any] = stack.http.get("/admin/v1/models/hello", headers=headers).json()["versions"][0]
        return version

    (error,) = wait_until(lambda: shown({})["errors"], what="the worker has told of its errors")
    assert "ValueError: <b>fail</b> \\x1b[31m" in error["text"]
    assert (error["count"], error["worker"][:5]) == (3, "cpu-0")
    assert len(error["text"]) < 1000
    function = shown({})["function"]
    assert (function["file"], function["packages"]) == ("service.py", ["greeting==1.5"])
    assert "network and other processes: none" in function["may"]
    page = stack.http.get("/admin/v1/models/hello/versions/1/function").json()
    assert "<img src=x onerror=alert(1)>" in page["code"]
    assert not page["cut"]
    assert "greeting==1.5" in page["build_log"]
    described = Millstream(stack.home).ok("describe", "hello")
    assert "packages greeting==1.5" in described
    assert "\x1b" not in described
    reader = key(stack, "reader", "models:read:hello")
    assert shown(reader)["errors"] == []
    assert shown(reader)["function"]["packages"] == ["greeting==1.5"]
    path = "/admin/v1/models/hello/versions/1/function"
    assert stack.http.get(path, headers=reader).status_code == 403
    assert stack.http.get(path, headers=key(stack, "writer", "models:write:hello")).status_code == 200


def test_a_long_file_is_cut_and_another_version_is_no_function(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "service.py"
    path.write_text("def predict(text: str) -> str:\n    return text\n" + "# " + "é" * CODE_BYTES_MAX + "\n")
    stack.push("long", path)
    page = stack.http.get("/admin/v1/models/long/versions/1/function").json()
    assert page["cut"] is True
    assert page["code"].startswith("def predict") and len(page["code"].encode()) <= CODE_BYTES_MAX + 2
    assert page["build_log"] == ""
    assert stack.http.get("/admin/v1/models/long/versions/2/function").status_code == 404
    assert stack.http.get("/admin/v1/models/absent/versions/1/function").status_code == 404
