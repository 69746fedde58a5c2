"""A reverse proxy on this machine opens nothing for its callers: a real nginx in front of a real gateway."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.kit.ports import free_port
from tests.kit.stack import running_stack
from tests.kit.tools import program
from tests.kit.wait import wait_until

pytestmark = pytest.mark.needs("nginx")

_CONFIG = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; location / {{ {directives} proxy_pass {upstream}; }} }}
}}
"""
#: ways to forward: nginx's defaults, which were HTTP/1.0 and are HTTP/1.1; as a local caller would; as proxies should
_WAYS = {
    "defaults": "",
    "1.1": "proxy_http_version 1.1;",
    "hidden": "proxy_http_version 1.1; proxy_set_header Host 127.0.0.1; proxy_set_header Connection '';",
    "forwards": "proxy_http_version 1.1; proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;",
}
_CHANGES = (
    ("GET", "/admin/v1/models"),
    ("DELETE", "/admin/v1/models/digits"),
    ("POST", "/models"),
    ("POST", "/v2/repository/models/digits/load"),
    ("POST", "/v2/repository/models/digits/unload"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/trace/setting"),
    ("POST", "/v2/logging"),
)


@contextmanager
def _nginx(folder: Path, upstream: str, directives: str = "") -> Iterator[httpx2.Client]:
    """A client of an nginx that passes everything on to `upstream`."""
    folder.mkdir()
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, upstream=upstream, directives=directives))
    process = subprocess.Popen(
        [program("nginx"), "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, trust_env=False) as client:
            wait_until(lambda: process.poll() is not None or _listens(port))
            yield client
    finally:
        process.terminate()
        process.wait(120)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("way", _WAYS)
def test_a_proxy_opens_nothing_whatever_it_sends(tmp_path: Path, way: str) -> None:
    with running_stack(tmp_path) as stack, _nginx(tmp_path / "nginx", stack.url, _WAYS[way]) as client:
        for method, path in _CHANGES:
            reply = client.request(method, path)
            assert reply.status_code == 401, (method, path, reply.text)
        assert client.get("/v2").status_code == 200
        assert client.get("/admin/v1/models", headers=stack.headers).status_code == 200


def test_with_the_key_the_admin_api_works_through_a_proxy(tmp_path: Path) -> None:
    settings = {"admin_key": "secret"}
    with running_stack(tmp_path, settings=settings) as stack, _nginx(tmp_path / "nginx", stack.url) as client:
        assert client.get("/admin/v1/models").status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.get("/admin/v1/models", headers=headers).status_code == 200
