"""A proof, from the graph alone, that the rows of a model do not influence each other."""
