"""TVM: backend and compile target."""
