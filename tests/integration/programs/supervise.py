"""A supervisor over small children, as a process of its own: its settings are the environment's.

It says `ready URL` on its standard output once every child has said that it runs.
"""

from __future__ import annotations

import asyncio
import sys

from millstream.services.errors import Failure
from millstream.services.queue.server import socket_path
from millstream.services.queue.url import RedisAddress, async_client
from millstream.services.settings import Settings, settings_class
from millstream.services.supervisor.plan import EntryCommands, Running
from millstream.services.supervisor.supervisor import Supervisor

CHILD = (sys.executable, "-m", "tests.integration.programs.child")


class Lines:
    """Says everything on standard output, one line each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.load_s_max = 60.0

    def show_line(self, line: str) -> None:
        print(f"said {line}", flush=True)

    async def load_models(self, running: Running) -> None:
        url = self._settings.redis_url
        path = socket_path(running.home / "run")
        address = RedisAddress.parse(url.get_secret_value()) if url else RedisAddress.unix(str(path))
        async with async_client(address) as redis:
            for _ in range(running.gateways + sum(spec.initial for spec in running.pools.values())):
                # A wait without end would count as a dead connection.
                while (started := await redis.blpop(["test:started"], timeout=5)) is None:
                    pass
                assert isinstance(started[1], bytes)
                print(f"started {started[1].decode()}", flush=True)

    async def wait_until_ready(self, running: Running) -> None: ...

    def ready(self, running: Running) -> None:
        print(f"ready {running.url}", flush=True)

    def stopped(self) -> None:
        print("stopped", flush=True)


async def main() -> int:
    settings = settings_class().model_validate({"controller": False})
    entry = EntryCommands((*CHILD, "gateway"), (*CHILD, "worker"))
    try:
        return await Supervisor(settings, Lines(settings), entry).run()
    except Failure as failure:
        print(f"failure {failure.message}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
