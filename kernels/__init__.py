"""The cross operators as kernels; imported as ``fastcross.kernels``. Nothing here knows nn.Module or autograd."""

import os

# The process that imported fastcross. One forked from it has none of the OpenMP threads that PyTorch started there.
HOME = os.getpid()
