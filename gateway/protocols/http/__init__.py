"""What every HTTP protocol shares."""
