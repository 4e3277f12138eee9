"""fastcross: the Deep & Cross Network (Wang et al., 2017), as fast as the hardware allows."""

from pathlib import Path

# In a checkout `kernels/` lies beside this folder; installed, it lies inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from fastcross import reference
from fastcross._version import __version__
from fastcross.export import export
from fastcross.functional import cross_layer, cross_logits, cross_network
from fastcross.layers import CrossLayer, CrossNetwork
from fastcross.model import DCN, DCNConfig
from fastcross.peers import cross_state_dict
from fastcross.swap import swap

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
