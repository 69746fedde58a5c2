"""The `millstream` command, and `python -m millstream.services.cli` where it is not installed.

Ctrl-C ends it with exit code 130, also while modules are imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    try:
        _main()
    except KeyboardInterrupt:
        sys.exit(130)


def _main() -> None:
    from millstream.services.extras import exit_without
    from millstream.services.process.gc_tuning import collect_rarely, exit_without_gc

    collect_rarely()
    exit_without_gc()
    exit_without("cli")
    from millstream.services.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
