"""`python -m services.cli`: the `millrace` command where it is not installed."""

from services.cli.app import main

main()
