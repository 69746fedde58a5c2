"""What `millstream top` shows: readings of a server, the rates between two of them, and their picture."""
