"""Instances in processes of their own: the mechanism alone. Plug-ins say what runs in such a process."""
