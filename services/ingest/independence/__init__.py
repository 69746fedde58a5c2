"""A proof, from the graph alone, that the rows of a model do not influence each other."""

from millstream.services.ingest.independence.analysis import Proof, prove

__all__ = ["Proof", "prove"]
