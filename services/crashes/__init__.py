"""Finds out why a worker died, and which model version is at fault."""
