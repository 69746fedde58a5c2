"""Parts that all protocols over HTTP share: bodies, errors, authorisation, compression, the adapter record."""
