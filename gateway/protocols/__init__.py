"""One folder for each protocol: its routes or calls, and its codec."""
