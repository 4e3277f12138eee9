"""Batch normalisation over the rows of all ranks, so that a model learns the same on any number of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class GlobalBatchNorm(nn.BatchNorm1d):
    """``y = (x - μ) / √(σ² + ε) · weight + bias``, μ and σ² over the rows of all ranks; parameters as BatchNorm1d's."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        # μ and Σ(x - μ)² of each rank, joined: sums of squares themselves would cancel in float32.
        rows = torch.full((1, x.shape[1]), float(x.shape[0]), device=x.device)
        detached = x.detach().float()
        mean = detached.mean(0, keepdim=True).nan_to_num()  # a rank without rows has weight 0
        local = torch.cat((rows, mean, (detached - mean).square().sum(0, keepdim=True)))
        found = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(found, local)
        n, means, squares = torch.stack(found).unbind(1)
        total = n.sum(0)
        mu = (n * means).sum(0) / total
        variance = (squares + n * (means - mu).square()).sum(0) / total
        self._count(mu, variance, total)
        y = _Normalise.apply(x, mu, torch.rsqrt(variance + self.eps), total)
        return torch.addcmul(self.bias, y, self.weight).to(x.dtype)

    @torch.no_grad()
    def _count(self, mu: Tensor, variance: Tensor, total: Tensor) -> None:
        """The running statistics, of which the variance is the unbiased one, as BatchNorm1d keeps them."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mu, self.momentum)
        self.running_var.lerp_(variance * total / (total - 1), self.momentum)


class _Normalise(torch.autograd.Function):
    """y = (x - μ) s;  dx = s (dy - mean dy - y · mean(dy y)), means over the rows of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mu: Tensor, s: Tensor, total: Tensor) -> Tensor:
        y = (x - mu) * s
        ctx.save_for_backward(y, s, total)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, s, total = ctx.saved_tensors
        sums = torch.stack((dy.sum(0), (dy * y).sum(0)))
        dist.all_reduce(sums)
        mean_dy, mean_dyy = sums / total
        return s * (dy - mean_dy - y * mean_dyy), None, None, None


def synchronise(model: nn.Module) -> None:
    """Give every BatchNorm1d of ``model`` the statistics of all ranks."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.BatchNorm1d:
                replacement = GlobalBatchNorm(child.num_features, child.eps, child.momentum, device="meta")
                replacement.load_state_dict(child.state_dict(), assign=True)
                setattr(module, name, replacement)
