"""A plug-in of another distribution: a backend without a library. That it works shows that the interface suffices."""
