"""`millstream plan`: how many workers a fleet of models needs, by simulation."""
