"""A dependency of another version, whose private parts have changed: each program says so in one line and ends.

The other version is faked by a `sitecustomize` that Python imports when it starts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment

GATEWAY = ("-m", "millstream.gateway")
WORKER = ("-m", "millstream.workers", "--pool", "cpu")
CLI_UP = ("-m", "millstream.services.cli", "up")
UVICORN = "pip install 'uvicorn<0.55,>=0.54'"
REDIS = "pip install 'redis<9,>=8.1'"
HIREDIS = "pip install 'hiredis"

CASES: dict[str, tuple[str, list[tuple[str, ...]], list[str]]] = {
    "uvicorn without a method": (
        (
            "import uvicorn.protocols.http.httptools_impl as m; del m.HttpToolsProtocol._start_asgi_task\n"
            "import uvicorn; uvicorn.__version__ = '0.99.0'"
        ),
        [GATEWAY],
        ["uvicorn 0.99.0", "it lacks HttpToolsProtocol._start_asgi_task", UVICORN],
    ),
    "uvicorn without a class": (
        (
            "import uvicorn.protocols.http.flow_control as m; del m.FlowControl\nimport sys\n"
            "sys.modules.pop('uvicorn.protocols.http.httptools_impl', None)"
        ),
        [GATEWAY],
        ["cannot import name 'FlowControl'", UVICORN],
    ),
    "uvicorn without a module": (
        "import sys; sys.modules['uvicorn.protocols.http.httptools_impl'] = None",
        [GATEWAY],
        ["uvicorn.protocols.http.httptools_impl", UVICORN],
    ),
    "redis without a method": (
        "import redis.connection as m; del m.AbstractConnection.on_connect\nimport redis; redis.__version__ = '9.9.9'",
        [GATEWAY, WORKER, CLI_UP],
        ["redis 9.9.9", "it lacks redis.connection.AbstractConnection.on_connect", REDIS],
    ),
    "redis that asks another method for the master": (
        (
            "import redis.asyncio.sentinel as m\nasync def other(self): return await self.sentinel_manager.find()\n"
            "m.SentinelConnectionPool.get_master_address = other"
        ),
        [GATEWAY, WORKER, CLI_UP],
        ["discover_master in redis.asyncio.sentinel.SentinelConnectionPool.get_master_address", REDIS],
    ),
    "redis without a class": (
        "import redis.sentinel as m; del m.SentinelConnectionPoolProxy",
        [WORKER],
        ["cannot import name 'SentinelConnectionPoolProxy'", REDIS],
    ),
    "hiredis that packs in another way": (
        "import hiredis; hiredis.pack_command = lambda words: b''; hiredis.__version__ = '7.0'",
        [WORKER],
        ["hiredis 7.0", "it lacks pack_command", HIREDIS],
    ),
    "hiredis without a method": (
        "import hiredis\nclass Reader: pass\nhiredis.Reader = Reader",
        [WORKER],
        ["'Reader' object has no attribute 'feed'", HIREDIS],
    ),
}
PARAMETERS = [
    pytest.param(fake, program, words, id=f"{name}: {program[1]}")
    for name, (fake, programs, words) in CASES.items()
    for program in programs
]


@pytest.mark.parametrize(("fake", "program", "words"), PARAMETERS)
def test_a_changed_dependency_is_one_line(
    tmp_path: Path, fake: str, program: tuple[str, ...], words: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(fake)
    environment = {"PYTHONPATH": str(tmp_path), "MILLSTREAM_HOME": str(tmp_path / "home"), "MILLSTREAM_HTTP_PORT": "0"}
    done = subprocess.run(
        [sys.executable, *program],
        env=child_environment(environment),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "does not fit this release of Millstream, which needs " in line
    for part in words:
        assert part in line, line
    assert not done.stdout
