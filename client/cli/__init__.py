"""Commands of `millstream` that call a server, and what all commands share."""
