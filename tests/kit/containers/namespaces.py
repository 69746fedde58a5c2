"""Says whether processes of this machine can stand for containers. Standard library only."""

from __future__ import annotations

import os
import subprocess

#: options of setpriv: what `cap_drop: [ALL]` and `no-new-privileges` do
NO_RIGHTS = ("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs")


def available() -> bool:
    """Return whether `Host` works here."""
    if os.geteuid():
        return False
    command = ("unshare", "--net", "--mount", "--", "setpriv", *NO_RIGHTS, "true")
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False
