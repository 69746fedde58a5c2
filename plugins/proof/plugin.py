"""A proof, from the graph alone, that the rows of a model do not influence each other."""

from millstream.services.plugin.plugin import Plugin

PLUGIN = Plugin(name="proof", provers=("millstream.plugins.proof.batch_rewrite:PROVER",))
