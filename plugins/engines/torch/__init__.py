"""PyTorch: exported programs, their inspection and AOTInductor."""
