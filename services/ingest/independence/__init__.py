"""A proof, from the graph alone, that the rows of a model do not influence each other."""

from millstream.services.ingest.independence.analysis import Proof, changed_nodes, prove

__all__ = ["Proof", "changed_nodes", "prove"]
