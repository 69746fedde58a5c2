"""Vertex AI's contract for prediction containers, on the codec of /invocations."""
