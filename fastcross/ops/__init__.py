"""The operators. One file per operator or family: checks, schema, fake, autograd Function, public function."""

from fastcross.ops.cross_layer import cross_layer
from fastcross.ops.cross_network import cross_logits, cross_network
from fastcross.ops.embedding import embedding_stack
from fastcross.ops.multiplicative import cross_fcn, cross_gated, cross_low_rank, cross_matrix, cross_mixture

__all__ = [
    "cross_fcn",
    "cross_gated",
    "cross_layer",
    "cross_logits",
    "cross_low_rank",
    "cross_matrix",
    "cross_mixture",
    "cross_network",
    "embedding_stack",
]
