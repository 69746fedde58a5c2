"""`python -m millstream.services.cli`: the `millstream` command where it is not installed."""

from millstream.services.cli.app import main

main()
