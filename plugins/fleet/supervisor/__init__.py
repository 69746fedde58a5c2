"""The number of workers of a pool on one machine."""
