"""What the gateway and the workers both stand on: types, the queue, the repository, settings, the command line."""
