"""python -m millstream.services.plugin NAME …: runs a process that a plug-in adds."""

from __future__ import annotations

import runpy
import sys

from millstream.services.errors import Failure
from millstream.services.plugin.plugin import Process
from millstream.services.plugin.registry import contributions


def run(arguments: list[str]) -> None:
    """Run the process that the first argument names, with the others. Exits with 2 if there is none."""
    try:
        known = {process.name: process.module for process in contributions("process", Process)}
    except Failure as failure:
        sys.exit(failure.message)
    name = arguments[0] if arguments else ""
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        print(f"usage: python -m millstream.services.plugin NAME …; the processes are: {listed}", file=sys.stderr)
        sys.exit(2)
    sys.argv = arguments
    runpy.run_module(known[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run(sys.argv[1:])
