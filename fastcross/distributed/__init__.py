"""Beyond one machine: TorchRec shards the embedding tables, DDP replicates the rest, torchrun restarts what dies.

torchrun      what asks for several processes, and starting those of one machine
process_group rank, device, collectives; who prints when something fails
sharding      an experiment's processes: where its model, optimiser and run folder come from
model         a DCN from meta tensors to a sharded model and its optimiser
tables        the embedding and stacking layer on a TorchRec EmbeddingBagCollection, and how it is sharded
lookup        fastcross's own rows inside TorchRec's tables, where fbgemm has no optimiser for the device
batch_norm    batch normalisation over the rows of all ranks
optim         the optimiser of a sharded model
storage       a run folder that all ranks write
convert       sharded checkpoints to and from the single-machine format
internals     what TorchRec and PyTorch keep private
"""
