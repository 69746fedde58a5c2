"""Races in the admin API."""
