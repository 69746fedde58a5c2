"""What runs graphs in a gateway."""
