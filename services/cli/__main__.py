"""The `millstream` command, and `python -m millstream.services.cli` where it is not installed."""

from __future__ import annotations

from millstream.services.extras import exit_without


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    exit_without("cli")
    from millstream.services.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
