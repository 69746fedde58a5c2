"""What gateways and workers share: types, the queue, the repository, settings, the command line."""
