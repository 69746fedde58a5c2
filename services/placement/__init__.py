"""Which worker holds which version, and what it unloads for another one. Every decision here is pure."""
