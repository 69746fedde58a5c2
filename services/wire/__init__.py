"""What gateways and workers say to each other."""
