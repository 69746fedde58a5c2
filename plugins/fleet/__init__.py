"""Controller, planner and autoscaling: decisions for all workers of an installation."""
