"""TorchEasyRec: Linears of (1, d) and biases of (d,). Its ``CrossV2`` multiplies low-rank matrices."""

from fastcross.interop.peers.peer import LOW_RANK, Peer

PEER = Peer(
    "tzrec.modules.interaction.Cross",
    "w.{}.weight",
    "b.{}",
    others=(("tzrec.modules.interaction.CrossV2", LOW_RANK),),
)
