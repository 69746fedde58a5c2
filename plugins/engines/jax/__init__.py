"""Functions that jax.export serialized: what their files say, and how they are loaded into JAX."""
