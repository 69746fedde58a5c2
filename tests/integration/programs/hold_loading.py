"""`millstream up` with the example, which loads it and then, until a line comes on standard input, goes on loading."""

from __future__ import annotations

import asyncio
import sys

from millstream.services.cli.preload import PreloadPlan, parse_preload
from millstream.services.cli.startup_view import StartupView
from millstream.services.settings import Settings
from millstream.services.supervisor.plan import Running
from millstream.services.supervisor.supervisor import Supervisor


class HeldView(StartupView):
    """Prints `loaded URL GRPC` when the example is loaded, and `ready` when the installation serves."""

    async def load_models(self, running: Running) -> None:
        await super().load_models(running)
        print(f"loaded {running.local_url} {running.grpc}", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

    def ready(self, running: Running) -> None:
        print("ready", flush=True)


async def main() -> int:
    view = HeldView(PreloadPlan(parse_preload("", example=True)), key=None)
    return await Supervisor(Settings(), view).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
