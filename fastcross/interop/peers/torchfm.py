"""torchfm (pytorch-fm): Linears of (1, d) and biases of (d,)."""

from fastcross.interop.peers.peer import Peer

PEER = Peer("torchfm.layer.CrossNetwork", "w.{}.weight", "b.{}")
