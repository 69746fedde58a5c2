"""The checks of `millstream doctor`: what is installed, the system's limits, Redis, clocks and the installation."""
