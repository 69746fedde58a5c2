"""`python -m services.cli`: the `millstream` command where it is not installed."""

from services.cli.app import main

main()
