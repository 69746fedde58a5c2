"""The server side of an HTTP/2 connection. Pure: bytes and instants in, events and bytes out."""
