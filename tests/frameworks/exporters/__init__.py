"""Makers of small models in the formats of common exporters. Each runs alone, where its framework is installed."""
