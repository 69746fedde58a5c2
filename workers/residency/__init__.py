"""Which versions a worker holds: what it loads by itself, what it is ordered to load, and what it unloads for that."""
