"""What a gateway shows of functions."""
