"""RecBole: the cross network is a method of the whole model, its parameters (d,) lie among the model's."""

from fastcross.interop.peers.peer import MATRICES, Peer

PEER = Peer(
    "recbole.model.context_aware_recommender.dcn.DCN",
    "cross_layer_w.{}",
    "cross_layer_b.{}",
    method="cross_network",
    leading_dimensions=False,
    others=(("recbole.model.context_aware_recommender.dcnv2.DCNV2", MATRICES),),
)
