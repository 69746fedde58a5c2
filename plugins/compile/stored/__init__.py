"""What the repository keeps of races."""
