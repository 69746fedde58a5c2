"""A small real child: says in Redis that it runs, serves or waits, and on SIGTERM says that Redis was still there.

python -m tests.integration.programs.child gateway --fd N --index I
python -m tests.integration.programs.child worker --pool NAME --index I
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from millstream.services.installation import shm_prefix
from millstream.services.queue.url import RedisAddress, client
from millstream.services.settings import Settings


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main(kind: str, arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    settings = Settings()
    assert settings.redis_url is not None
    redis = client(RedisAddress.parse(settings.redis_url.get_secret_value()))
    name = f"{options.get('--pool', kind)}-{options['--index']}"

    def stop(*_: object) -> None:
        redis.rpush("test:stopped", name)
        # Redis goes away with the others: the order they stopped in has to outlive it.
        with (settings.home / "stopped").open("a") as file:
            file.write(name + "\n")
        if options.get("--pool") == "stubborn":
            return
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    if options.get("--pool") == "parent":
        grandchild = subprocess.Popen(["sleep", "1000"])
        redis.set("test:grandchild", grandchild.pid)
    segment = Path(settings.shm_dir) / f"{shm_prefix(settings)}.{name}"
    segment.write_bytes(b"x")
    print(f"WARNING {name} is only a test")
    redis.rpush("test:started", f"{name}-{os.getpid()}")
    if "--ready-fd" in options:
        os.write(int(options["--ready-fd"]), b"ready\n")
    if kind == "gateway":
        server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.socket(fileno=int(options["--fd"]))
        server.serve_forever()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
