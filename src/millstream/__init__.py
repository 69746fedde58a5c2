"""Millstream, a self-hosted model serving platform.

The folders `gateway`, `services`, `workers` and `examples` are at the root of the repository; beside this file are
links to them. So one import package, `millstream`, is the same for a checkout, an editable install, a wheel, mypy and
editors, and collides with no other distribution's `services`.
"""
