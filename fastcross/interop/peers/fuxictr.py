"""FuxiCTR: a module per layer, with a Linear of (1, d) and a bias of (d,)."""

from fastcross.interop.peers.peer import MATRICES, Peer

_MODULE = "fuxictr.pytorch.layers.interactions.cross_net"

PEER = Peer(
    f"{_MODULE}.CrossNet",
    "cross_net.{}.weight.weight",
    "cross_net.{}.bias",
    others=((f"{_MODULE}.CrossNetV2", MATRICES),),
)
