"""Compiled forms of the versions that a worker serves: made, tried, swapped in, and undone; and loads on trial."""
