"""The operator as a function: L cross layers, their gradients, and the paper's equation."""

import torch

import fastcross

torch.manual_seed(0)
x0 = torch.randn(4096, 1026, requires_grad=True)  # (B, d)
weight = (torch.randn(6, 1026) / 1026).requires_grad_()  # (L, d): one w per layer
bias = torch.zeros(6, 1026, requires_grad=True)  # (L, d); optional

y = fastcross.cross_network(x0, weight, bias)  # x_L, (B, d)
y.square().mean().backward()
for name, tensor in {"y": y, "dx0": x0.grad, "dw": weight.grad, "db": bias.grad}.items():
    print(name, tuple(tensor.shape))

literal = fastcross.cross_network(x0, weight, bias, backend="reference")  # layer by layer
print(f"largest difference to the paper's equation: {(y - literal).abs().max():.1e}")
