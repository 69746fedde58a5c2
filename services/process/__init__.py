"""Helpers of any long-running process."""
