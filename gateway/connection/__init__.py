"""Bytes on a socket, below ASGI: connections, budgets, the fast path, the server and its drain."""
