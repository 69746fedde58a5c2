"""OpenVINO: backend, file format and compile targets."""
