"""The Deep & Cross Network and the models the paper compares it with. This module imports none of them, so that the
command line learns their names without PyTorch."""

CROSS_TYPES = ("vector", "matrix", "low_rank", "mixture", "gated", "fcn")  # of DCN

# By the names of the command line and of run folders, in the order of the paper's table 1. See base.model_class.
MODELS = {
    "dcn": "dcn.DCN",
    "deep_crossing": "baselines.DeepCrossing",
    "dnn": "baselines.DNN",
    "wide_deep": "baselines.WideDeep",
    "fm": "baselines.FactorizationMachine",
    "lr": "baselines.LogisticRegression",
}
