"""Spans of requests, as a gateway records them."""
