"""The commands: one file for each, or for two that belong together."""
