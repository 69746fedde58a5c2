"""What became of each request: the source of traces and of the access log. Nothing here runs while both are off."""
