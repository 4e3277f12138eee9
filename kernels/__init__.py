"""The operators' kernels, imported as ``fastcross.kernels``. They use neither nn.Module nor autograd."""
