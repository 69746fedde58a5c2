"""Compiles versions for the hardware at hand: candidates, targets, and the process that a compilation runs in."""
