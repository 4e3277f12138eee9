"""DeepCTR-Torch: ``kernels`` and ``bias`` are (L, d, 1). The same class with matrices is told apart by its shapes."""

from fastcross.interop.peers.peer import Peer

PEER = Peer("deepctr_torch.layers.interaction.CrossNet", "kernels", "bias", leading_dimensions=False)
