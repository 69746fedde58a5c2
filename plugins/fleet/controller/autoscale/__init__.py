"""Decides how many workers each pool needs, from arrivals, run times, backlog and start times; keeps the arithmetic.

Pure: no I/O, no event loop; instants are passed in, so that a simulation runs the same code under a virtual clock.
"""
