"""Inputs and outputs of a request, checked against the signature; knows no protocol."""
