"""The name by which supervisors and manifests of the release before start a controller; it goes with the next one."""

from __future__ import annotations

import sys

from millstream.services.plugin.__main__ import run

if __name__ == "__main__":
    run(["controller", *sys.argv[1:]])
