"""Load on demand: has a worker load the version that a request waits for."""
