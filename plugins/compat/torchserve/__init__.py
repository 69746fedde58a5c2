"""TorchServe's inference and management API."""
