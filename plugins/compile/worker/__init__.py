"""Races of compiled forms: which one a worker runs, and the process that measures the candidates on this machine."""
