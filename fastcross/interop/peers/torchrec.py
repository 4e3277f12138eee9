"""TorchRec: a ParameterList of (d, 1) each. Its ``CrossNet`` is the second version of the paper."""

from fastcross.interop.peers.peer import LOW_RANK, MATRICES, Peer

PEER = Peer(
    "torchrec.modules.crossnet.VectorCrossNet",
    "kernels.{}",
    "bias.{}",
    leading_dimensions=False,
    others=(
        ("torchrec.modules.crossnet.CrossNet", MATRICES),
        ("torchrec.modules.crossnet.LowRankCrossNet", LOW_RANK),
    ),
)
