"""The Python client, and the HTTP client of the command line.

method of Client ─> steps (pure: calls, pauses, their replies) ─> with_retries ─> a transport sends each call ─> result
Client and AsyncClient differ in the transport alone. `from millstream import Client` is the public name.
"""
