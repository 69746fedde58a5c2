"""A controller in a process of its own beside a stack, as in a fleet: tests freeze and kill it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from tests.kit.stack import Stack

COMMAND = (sys.executable, "-P", "-m", "millstream.services.plugin", "controller")
STOP_S_MAX = 120.0


class ControllerBeside:
    """The process, which may be started again."""

    def __init__(self, stack: Stack, settings: Mapping[str, object]) -> None:
        known = {"home": stack.home, "redis_url": f"unix://{stack.socket}", "installation_name": stack.installation}
        self._environment = os.environ | {
            f"MILLSTREAM_{name.upper()}": str(value) for name, value in {**known, **settings}.items()
        }
        self._log = stack.home / "logs" / "beside.log"
        self.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(COMMAND, env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def controller_beside(
    stack: Stack, settings: Mapping[str, object] = MappingProxyType({})
) -> Iterator[ControllerBeside]:
    """Run a controller until the block ends; then it has to stop when it is told."""
    controller = ControllerBeside(stack, settings)
    try:
        yield controller
        controller.process.terminate()
        assert controller.process.wait(STOP_S_MAX) == 0
    finally:
        controller.kill()
