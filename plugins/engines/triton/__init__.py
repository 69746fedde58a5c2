"""Models that a Triton server beside the worker runs."""
