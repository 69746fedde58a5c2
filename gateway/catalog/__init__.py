"""The models, versions and workers that exist, and what a key may keep."""
