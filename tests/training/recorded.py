"""A CUDA graph's rules on the CPU: the operators of a step are recorded, and replayed on the very same memory.

Python does not run again, so that whatever a step read from there, a number of steps or a learning rate, stays what it
was; an operator whose result the host reads cannot be recorded.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastcross import optim
from fastcross.training import loop
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer
from fastcross.training.step import CapturedStep
from tests.training.helpers import small_dcn, weights

CHANGING = {"batch_size": 128, "max_steps": 12, "schedule": "cosine", "warmup_steps": 3, "lr": 0.02, "clip_norm": 0.5}
HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten._unique", "aten.unique", "aten._coalesce", "aten.equal")


class RecordedGraphs:
    """As step.CudaGraphs, which runs nothing as it records: here operators run, and all they change is restored."""

    def __init__(self, changed):
        self.changed = changed  # a function that returns the tensors that a step changes

    def warm_up(self, step):
        return step()

    def record(self, step):
        before = [(tensor, tensor.detach().clone()) for tensor in self.changed()]
        generator = torch.get_rng_state()
        with _Recording() as recording:
            found = step()
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        torch.set_rng_state(generator)

        @torch.no_grad()
        def replay():
            for function, args, kwargs, results in recording.calls:
                fresh = tree_leaves(function(*args, **kwargs))
                for result, new in zip(results, fresh, strict=True):
                    if result is not None:
                        result.copy_(new)
            return found

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(function).startswith(HOST_READS):
            raise RuntimeError(f"{function} waits for the device")
        if str(function).startswith("aten.clone") and args[0].is_sparse:
            # Autograd takes a sparse gradient over as it is, and makes a copy only where a mode like this one looks on.
            contents = args[0]._indices(), args[0]._values(), args[0].shape
            return torch.sparse_coo_tensor(*contents, check_invariants=False, is_coalesced=args[0].is_coalesced())
        known = {pointer for leaf in tree_leaves((args, kwargs)) for pointer in _memory(leaf)}
        found = function(*args, **kwargs)
        # A view, or an operand that was changed in place, needs no copy: its memory is an operand's.
        results = [None if known & _memory(leaf) or not _memory(leaf) else leaf for leaf in tree_leaves(found)]
        self.calls.append((function, args, kwargs, results))
        return found


def _memory(leaf):
    if not isinstance(leaf, torch.Tensor):
        return set()
    parts = (leaf._indices(), leaf._values()) if leaf.is_sparse else (leaf,)
    return {part.untyped_storage().data_ptr() for part in parts}


def train(cache, monkeypatch, graphs=None, lines=None, make=small_dcn, updated_by=None, interval=1, **training):
    """The weights and the losses of a training whose steps are recorded by ``graphs``, or by what it makes of the
    trainer."""
    model = make(cache)
    trainer = Trainer(
        model,
        cache,
        TrainingConfig(**CHANGING | training),
        show=None if lines is None else lines.append,
        optimizer=updated_by(model) if updated_by else None,
    )
    trainer.divergence.interval = interval
    torch.manual_seed(3)
    with monkeypatch.context() as patch:
        if graphs is not None:
            made = graphs(trainer) if callable(graphs) else graphs
            patch.setattr(loop, "captured_step", lambda step, show: CapturedStep(step, step.rows, made, show))
        trainer.fit()
    return weights(model), [row["train_loss"] for row in trainer.history]


def capturable(name):
    def configured(model):
        # Gradients stay as they were: on a CPU only dense ones can be recorded, their sizes being known.
        sparse = model.config.sparse_gradients or model.config.backend == "triton"
        return optim.configure(model, 0.02, name, sparse_gradients=sparse, capturable=True, backend="torch")

    return configured


def replaying(trainer):
    """The graphs of a trainer, whose step changes parameters, statistics, and what its optimiser keeps."""

    def tensors():
        of_groups = (value for group in trainer.optimizer.param_groups for value in group.values())
        kept = (value for part in trainer.optimizer.parts for state in part.state.values() for value in state.values())
        found = (*trainer.model.state_dict().values(), *of_groups, *kept)
        return [value for value in found if isinstance(value, torch.Tensor)]

    return RecordedGraphs(tensors)
