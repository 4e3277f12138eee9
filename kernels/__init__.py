"""The cross operators as kernels; imported as ``fastcross.kernels``. Nothing here knows nn.Module or autograd."""
