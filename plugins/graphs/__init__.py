"""Graphs: versions whose steps are calls of other versions, run by the gateway."""
