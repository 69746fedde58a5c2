"""`millstream up | head -1`: the server serves on without a reader, and a stop leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.kit.command_line import ROOT, Millstream
from tests.kit.wait import wait_until


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_server_whose_output_nobody_reads_serves_and_stops_cleanly(tmp_path: Path, options: tuple[str, ...]) -> None:
    run_dir = tmp_path / "home" / "run"
    url = run_dir / "url"
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "millstream.services.cli", "up", "--http-port", "0", "--grpc-port", "-1", *options],
        cwd=ROOT,
        env=Millstream(tmp_path / "home").environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writer)
        os.close(reader)

        def answers() -> bool:
            assert process.poll() is None, process.communicate()[1]
            if not url.exists():
                return False
            try:
                return httpx2.get(f"{url.read_text().strip()}/v2/health/ready", timeout=60).status_code == 200
            except httpx2.TransportError:
                return False

        try:
            wait_until(answers, what="it serves")
        finally:
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert "Traceback" not in stderr
    assert {path.name for path in run_dir.iterdir()} <= {"loads", "lock", "token"}
