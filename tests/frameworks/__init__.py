"""Tests that need a heavy framework: `make test-frameworks` runs them in an environment of its own."""
