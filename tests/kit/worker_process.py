"""Starts a worker process beside a running stack, with another backend or in another pool than those of `up`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from millstream.services.environment import child_environment
from millstream.services.installation import installation_name
from millstream.services.settings import Settings
from tests.kit.stack import WAIT_S, Stack


@contextmanager
def running_worker(
    stack: Stack,
    pool: str,
    backend: str = "simulated",
    *,
    index: int = 0,
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker of `pool`; at the end stop it, and check that it drained and ended with exit code 0.

    A worker that the block killed (-SIGKILL) or that ended in it is not checked.

    Args:
        settings: fields of millstream.services.settings.Settings.
        environment: further variables.
    """
    own = Settings(home=stack.home)
    variables = {
        "MILLSTREAM_HOME": str(stack.home),
        "MILLSTREAM_REDIS_URL": f"unix://{stack.socket}",
        "MILLSTREAM_INSTALLATION_NAME": installation_name(own),
    } | {f"MILLSTREAM_{name.upper()}": str(value) for name, value in (settings or {}).items()}
    command = [sys.executable, "-P", "-m", "millstream.workers"]
    command += ["--pool", pool, "--index", str(index), "--backend", backend, "--threads", "1"]
    log = stack.home / "logs" / f"{pool}-{index}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=child_environment({**variables, **(environment or {})}), stdout=output, stderr=output
        )
        try:
            yield process
            if process.poll() is None:
                process.terminate()
                assert process.wait(WAIT_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
