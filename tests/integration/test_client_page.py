"""The Python programs of docs/client.md and the README's first one run as they are, beside a running product."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.client.user_config import read_user_config
from millstream.services.environment import child_environment
from tests.kit.stack import CALL_S_MAX, ROOT, Stack

PAGE = (ROOT / "docs/client.md").read_text()
SECTION = (ROOT / "README.md").read_text().partition("## From Python")[2]


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found


PROGRAMS = [*blocks(PAGE, "python"), blocks(SECTION, "python")[0]]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs_of_the_pages_run(stack: Stack, number: int) -> None:
    stack.push("digits", ROOT / "examples/digits/digits.onnx")
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAMS[number]],
            cwd=ROOT,
            env=child_environment({"MILLSTREAM_ENDPOINT": stack.url, "MILLSTREAM_ADMIN_KEY": stack.key}),
            capture_output=True,
            text=True,
            timeout=CALL_S_MAX,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
    finally:
        for model in stack.http.get("/admin/v1/models").json()["models"]:
            if model["name"] in {"digits", "mine"}:
                stack.settled(model["name"], model["versions"][-1]["version"])
                stack.http.delete(f"/admin/v1/models/{model['name']}").raise_for_status()


def test_the_configuration_of_the_page_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "millstream"
    folder.mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (folder / "config.toml").write_text(blocks(PAGE, "toml")[0])
    (folder / "prod.key").write_text("key")
    config = read_user_config()
    assert config.find(None, "").url == "https://models.example.com"
    assert config.find(None, "").api_key == "key"
    assert config.find("local", "").ca_file is None
