"""Makes tensors of what requests give in another form."""
