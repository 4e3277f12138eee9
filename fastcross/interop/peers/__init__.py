"""The packages whose rank-one cross networks fastcross knows: a new one is one file here and one line below."""

from fastcross.interop.peers import deepctr_torch, fuxictr, recbole, torchfm, torchrec, tzrec
from fastcross.interop.peers.peer import Peer

PEERS: dict[str, Peer] = {
    module.PEER.path: module.PEER
    for module in (
        deepctr_torch,
        torchrec,
        fuxictr,
        torchfm,
        tzrec,
        recbole,
    )
}

__all__ = ["PEERS", "Peer"]
