"""The launchers of the Triton kernels, each on the device of its operands."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastcross.kernels import layers_of_products as products
from fastcross.kernels.gpu import cross_layer, cross_low_rank, cross_matrix, cross_network, embedding
from fastcross.kernels.gpu.multiplicative import with_steps


def _on_device(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be the operands'."""

    @functools.wraps(launcher)
    def launch(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):
            return launcher(*args)

    return launch


cross_layer_fwd = _on_device(cross_layer.cross_layer_fwd)
cross_layer_bwd = _on_device(cross_layer.cross_layer_bwd)
cross_network_fwd = _on_device(cross_network.cross_network_fwd)
cross_network_bwd = _on_device(cross_network.cross_network_bwd)
cross_logits_fwd = _on_device(cross_network.cross_logits_fwd)
cross_logits_bwd = _on_device(cross_network.cross_logits_bwd)
embedding_stack_keyed_fwd = _on_device(embedding.embedding_stack_keyed_fwd)
embedding_stack_keyed_bwd = _on_device(embedding.embedding_stack_keyed_bwd)
cross_matrix_fwd = _on_device(cross_matrix.cross_matrix_fwd)
cross_matrix_bwd = _on_device(cross_matrix.cross_matrix_bwd)
cross_gated_fwd = _on_device(cross_matrix.cross_gated_fwd)
cross_gated_bwd = _on_device(cross_matrix.cross_gated_bwd)
cross_low_rank_fwd = _on_device(cross_low_rank.cross_low_rank_fwd)
cross_low_rank_bwd = _on_device(cross_low_rank.cross_low_rank_bwd)
cross_mixture_fwd = _on_device(functools.partial(products.forward, with_steps(products.Mixture)))
cross_mixture_bwd = _on_device(functools.partial(products.backward, with_steps(products.Mixture)))
cross_fcn_fwd = _on_device(functools.partial(products.forward, with_steps(products.Fcn)))
cross_fcn_bwd = _on_device(functools.partial(products.backward, with_steps(products.Fcn)))
