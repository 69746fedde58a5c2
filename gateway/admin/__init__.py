"""Millstream's own management API."""
