"""A proof, from the graph alone, that the rows of a model do not influence each other."""

from millstream.plugins.proof.analysis import Proof, changed_nodes, prove

__all__ = ["Proof", "changed_nodes", "prove"]
