"""Which models there are and who serves them; small documents that gateways share."""
