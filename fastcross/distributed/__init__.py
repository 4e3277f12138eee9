"""Beyond one machine: TorchRec shards the embedding tables, DDP replicates the rest, torchrun restarts what dies.

processes   rank, device, process group; who prints when something fails
tables      the embedding and stacking layer on a TorchRec EmbeddingBagCollection, and how it is sharded
lookup      fastcross's own rows inside TorchRec's tables, where fbgemm has no optimiser for the device
batch_norm  batch normalisation over the rows of all ranks
model       a DCN from meta tensors to a sharded model and its optimiser
optim       the optimiser of a sharded model
storage     sharded checkpoints
convert     sharded checkpoints to and from the single-machine format
command     fastcross train --distributed, in each process
launch      starting the processes of one machine
"""

import logging
import warnings

# TorchRec's own advice to those who build on it; what concerns the user is raised.
for name in ("torchrec", "torch.fx._symbolic_trace"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torchrec|torch\.distributed)\b")
warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled", category=UserWarning)
warnings.filterwarnings("ignore", message=r".*(ShardedTensor|broadcast_buffers).*", category=FutureWarning)
