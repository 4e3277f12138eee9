"""fastcross: the Deep & Cross Network (Wang et al., 2017), as fast as the hardware allows."""

from fastcross import reference
from fastcross._version import __version__
from fastcross.interop.export import export
from fastcross.interop.peers import cross_state_dict
from fastcross.interop.swap import swap
from fastcross.layers.cross import CrossLayer, CrossNetwork
from fastcross.models.dcn import DCN, DCNConfig
from fastcross.ops import cross_layer, cross_logits, cross_network

__all__ = [
    "DCN",
    "CrossLayer",
    "CrossNetwork",
    "DCNConfig",
    "__version__",
    "cross_layer",
    "cross_logits",
    "cross_network",
    "cross_state_dict",
    "export",
    "reference",
    "swap",
]
