"""The Lua scripts as texts: each says what it reads and returns, and gets every key that is known before it runs."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, cast

import pytest

from millstream.services.queue import scripts
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.scripts import script, script_call

SCRIPTS = [file for file in files(scripts).iterdir() if file.name.endswith(".lua") and file.name != "_prelude.lua"]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_has_a_header(file):
    name, text = file.name.removesuffix(".lua"), file.read_text()
    assert re.match(rf"-- {name} \((gateway|worker|controller).*\): ", text)
    for part in ("-- KEYS: ", "-- ARGV: ", "-- returns "):
        assert part in text


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_a_script_names_each_of_its_keys_once(file):
    text = file.read_text()
    [names] = re.findall(r"^-- KEYS: (.*)$", text, re.MULTILINE)
    keys = names.split(", ")
    shared = keys[:5] == ["ready", "deadlines", "vtimes", "idle", "workers"]
    own = sorted(map(int, re.findall(r"KEYS\[(\d+)\]", text)))
    assert own in ([*range(6 if shared else 1, len(keys) + 1)], [])


@pytest.mark.parametrize("name", ["put", "next", "reclaim", "recover"])
def test_a_script_has_the_shared_functions_that_it_calls(name):
    text = script(name).text.decode()
    shared = re.findall(r"^local function (\w+)", files(scripts).joinpath("_prelude.lua").read_text(), re.MULTILINE)
    code = re.sub(r"--.*", "", text)
    for function in shared:
        if re.search(rf"\b(?<!function ){function}\(", code):
            assert f"local function {function}(" in code


def test_all_keys_of_a_call_have_the_hash_tag_of_the_pool():
    keys = InstallationKeys("test").pool("cpu")
    _, _, count, *rest = cast("Any", script_call("next", keys, (keys.inbox("w"), keys.lanes("w")), "w"))
    assert all(b"{test:cpu}" in key for key in rest[: count + 1])
    assert rest[count + 1 :] == ["w"]
