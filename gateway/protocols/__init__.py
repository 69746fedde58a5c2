"""One folder for each protocol: its adapter, its routes or calls, and its codec."""
