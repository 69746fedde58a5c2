"""What a model version is."""
