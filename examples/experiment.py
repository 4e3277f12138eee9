"""What `fastcross train` does, from Python: data, model and training as one object."""

from fastcross.training import Dataset, Experiment, TrainingConfig, load_model

experiment = Experiment(
    Dataset(rows=20_000, cache="log"),  # a generated log; your own: Dataset("train.csv")
    model="dcn",
    options={"cross_layers": 3, "deep_layers": [64, 64], "embedding_dim": 8},
    training=TrainingConfig(epochs=2, lr=0.003, seed=0),
)
result = experiment.run("runs/first", show=print)  # after a crash: resume("runs/first")
print(f"test logloss {result['test']['logloss']:.4f}")

loaded = load_model("runs/first")  # the best model and the encoder of its columns
print(loaded.model.config)
