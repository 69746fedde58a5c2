"""Keeps the instances that run equal to those that are wanted. One process of an installation leads."""
