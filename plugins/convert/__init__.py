"""Converts models of other frameworks into a form that a worker runs.

upload ─> an importer recognises its content ─> converted in a process of its own ─> checked like an upload
       ─> its answers compared with those that the source framework gave
"""
