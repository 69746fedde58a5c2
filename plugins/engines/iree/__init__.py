"""IREE: compiled ahead of time, by MLIR."""
