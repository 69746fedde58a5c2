"""The study of docs/autoscaling.md: day-long traces under a virtual clock, against the rules of other systems."""
