"""What reads requests that give texts or encoded files."""
