"""config.pbtxt: read, checked and turned into what the platform knows."""
