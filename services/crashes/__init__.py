"""What is known of a process after it died, and which version is held to account."""
