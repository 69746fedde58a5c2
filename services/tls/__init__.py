"""The certificates of the listeners: reading, checking and describing their files."""
