"""What all protocols over HTTP share."""
