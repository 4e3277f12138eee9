"""Canaries: what fastcross uses of TorchRec's and PyTorch's private interfaces is still there and does the same."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch

from fastcross.models.dcn import DCN
from fastcross.training import TrainingConfig
from tests.distributed.helpers import QUIET

pytest.importorskip("torchrec")
from fastcross.distributed import internals
from fastcross.distributed.model import shard
from fastcross.distributed.sharding import join
from fastcross.distributed.tables import StackLookup

pytestmark = QUIET


@pytest.fixture
def sharded():
    """A small DCN in one process, its tables TorchRec's."""
    with join("cpu") as processes:
        with torch.device("meta"):
            model = DCN((5, 7), 1, embedding_dim=4, cross_layers=1, deep_layers=(3,))
        yield shard(model, processes, TrainingConfig(optimizer="sgd"), "table", "fbgemm")[0]


def test_the_kernels_that_look_rows_up_are_found(sharded):
    found = list(internals.lookup_kernels(sharded.module.embedding.collection))
    assert found
    tables = [config.name for kernel, _ in found for config in kernel.config.embedding_tables]
    assert sorted(tables) == ["t0", "t1"]
    for kernel, operator in found:
        shapes = [tuple(weight.shape) for weight in operator.split_embedding_weights()]
        assert shapes == [tuple(config.local_metadata.shard_sizes) for config in kernel.config.embedding_tables]


def test_another_operator_takes_over(sharded):
    """The sums that come out are then those of the other operator's rows."""
    collection = sharded.module.embedding.collection
    inputs = torch.zeros(2, 1), torch.tensor([[1, 2], [3, 4]])
    before = sharded.module.embedding(*inputs)
    for kernel, operator in internals.lookup_kernels(collection):
        replacement = StackLookup(operator)
        internals.replace_operator(kernel, replacement)
        for table in replacement.stack.tables:
            table.data += 1
    torch.testing.assert_close(sharded.module.embedding(*inputs)[:, :-1], before[:, :-1] + 1)


def test_what_has_changed_in_torchrec_is_said(sharded):
    with pytest.raises(RuntimeError, match=r"TorchRec [\d.]+ has no lookups in a object"):
        list(internals.lookup_kernels(object()))
    (kernel, operator), *_ = internals.lookup_kernels(sharded.module.embedding.collection)
    kernel._emb_module = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="without fbgemm's operator"):
        list(internals.lookup_kernels(sharded.module.embedding.collection))

    class Elsewhere:
        emb_module = operator

    with pytest.raises(RuntimeError, match="keeps its operator elsewhere"):
        internals.replace_operator(Elsewhere(), torch.nn.Identity())


def test_sharded_tensors_from_local_shards_with_and_without_the_private_way(sharded, monkeypatch):
    (table, *_) = sharded.tables()
    shards = [internals.Shard(shard.tensor, shard.metadata) for shard in table.local_shards()]
    private = internals.sharded_tensor(shards, table.metadata())
    monkeypatch.delattr(internals.ShardedTensor, "_init_from_local_shards_and_global_metadata")
    public = internals.sharded_tensor(shards, table.metadata())
    for found in (private, public):
        assert found.metadata().size == table.metadata().size
        assert [s.metadata.shard_offsets for s in found.local_shards()] == [[0, 0]]
        assert found.local_shards()[0].tensor.data_ptr() == table.local_shards()[0].tensor.data_ptr()
    assert private.metadata().shards_metadata == public.metadata().shards_metadata


IMPORTS = """
import logging, warnings
filters, names = list(warnings.filters), ("torchrec", "torch.fx._symbolic_trace", "torch.distributed.elastic")
levels = [logging.getLogger(name).level for name in names]
import fastcross.distributed, fastcross.cli.train, fastcross.cli.predict
assert [logging.getLogger(name).level for name in names] == levels
assert list(warnings.filters)[-len(filters):] == filters, set(warnings.filters) - set(filters)
assert not [f for f in warnings.filters if f not in filters and f[0] == "ignore" and "torch.distributed" in str(f[3])]
import sys
assert "torchrec" not in sys.modules
"""


def test_importing_changes_nothing_for_others():
    """In 0.1 every command had its warnings and loggers changed, TorchRec or not."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_warnings_and_loggers_come_back():
    logger, before = logging.getLogger("torchrec"), list(warnings.filters)
    level = logger.level
    with join("cpu"):
        assert logger.level == logging.ERROR
    assert logger.level == level
    assert list(warnings.filters) == before
