"""Measures the candidates of a race on this machine: the driver, its track, and the processes that run candidates."""
