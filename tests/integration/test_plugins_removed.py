"""Each plug-in can be deleted: a gateway without its folder has the routes and methods of the core and the others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from millstream.gateway import app
from millstream.gateway.grpc import handlers
from millstream.gateway.grpc.methods.service import GrpcService
from millstream.gateway.http.adapter import Adapter
from millstream.services.environment import child_environment
from millstream.services.plugin.plugin import Plugin
from millstream.services.plugin.registry import load, plugins

ROOT = Path(__file__).parents[2]
LINE = re.compile(r'^([\w-]+) = "millstream\.plugins\.([\w.]+)\.plugin:PLUGIN"\n', re.MULTILINE)
PROJECT = (ROOT / "pyproject.toml").read_text()
#: name of a plug-in -> its folder below plugins/
FOLDERS = {name: module.replace(".", "/") for name, module in LINE.findall(PROJECT)}
#: Builds the application and the gRPC methods as a gateway does, and prints the names of their calls.
PROGRAM = """
import asyncio, json, sys
from millstream.gateway.app import adapters, build_app
from millstream.gateway.connection.drain import Drain
from millstream.gateway.gateway import Gateway
from millstream.gateway.grpc.codec.messages import Messages
from millstream.gateway.grpc.handlers import MethodTable, rows
from millstream.gateway.scheduling.readiness import Preloads
from millstream.services.settings import settings_class

async def main():
    settings = settings_class().model_validate({"home": sys.argv[1], "shm_dir": sys.argv[1], "redis_url": "redis://127.0.0.1:1"})
    deps = Gateway(settings, 0, Preloads()).deps()
    build_app(deps).openapi()
    MethodTable(deps, Drain(), Messages(deps.receive_budget, deps.reply_budget, 1 << 20))
    print(json.dumps([f"{method} {path}" for one in adapters() for method, path in one.access] + list(rows())))

asyncio.run(main())
"""


def calls_of(adapters: Collection[Adapter], services: Collection[GrpcService]) -> set[str]:
    routes = {f"{method} {path}" for adapter in adapters for method, path in adapter.access}
    return routes | {name for service in services for name in service.rows()}


def calls_of_plugin(plugin: Plugin) -> set[str]:
    return calls_of([load(plugin.name, one) for one in plugin.http], [load(plugin.name, one) for one in plugin.grpc])


def calls_without(names: Collection[str], folder: Path) -> set[str]:
    """Return the calls of a gateway in a tree without these plug-ins: their folders and their lines are deleted."""
    for name in ("gateway", "services", "workers", "client", "plugins", "src"):
        left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=left_out)
    for name in names:
        shutil.rmtree(folder / "plugins" / FOLDERS[name])
    (folder / "pyproject.toml").write_text(LINE.sub(lambda found: "" if found[1] in names else found[0], PROJECT))
    (folder / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder / "home"],
        env=child_environment({"PYTHONPATH": str(folder / "src"), "MILLSTREAM_PLUGINS": "all"}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_gateway_without_a_plug_in_has_the_calls_of_all_others(name: str, tmp_path: Path) -> None:
    others = [calls_of_plugin(plugin) for plugin in plugins() if plugin.name != name and name not in plugin.needs]
    core = calls_of(app.CORE, handlers.CORE) | handlers.STREAMS.keys()
    assert calls_without([name], tmp_path) == core.union(*others)


def test_a_gateway_without_any_plug_in_has_the_calls_of_the_core(tmp_path: Path) -> None:
    assert calls_without(FOLDERS, tmp_path) == calls_of(app.CORE, handlers.CORE) | handlers.STREAMS.keys()
