"""Runs the calls that a page tells its reader to make, as they are written."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

from tests.kit.containers.dockerfile import ROOT
from tests.kit.containers.host import Host


def run_calls(host: Host, page: Path, key: str) -> list[str]:
    """Run the calls of curl in the first block of shell that has some, and return what each prints.

    `key` is the value of the variable KEY.
    """
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    block = textwrap.dedent(next(text for text in blocks if "curl " in text)).replace("\\\n", " ")
    calls = [line for line in block.splitlines() if line.startswith("curl ")]
    assert calls
    found = []
    for call in calls:
        done = subprocess.run(
            [*host.prefix(), "env", "-i", f"PATH={ROOT}:/usr/bin:/bin", f"KEY={key}", "sh", "-euc", call],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    return found
