"""From a command's arguments to a trained model and back: a run's plan is JSON, to be resumed and repeated."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fastcross import __version__
from fastcross.data import Cache, Schema
from fastcross.models.baselines import MODELS
from fastcross.models.dcn import Model
from fastcross.training import checkpoint
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Trainer
from fastcross.training.ranks import ALONE, Ranks
from fastcross.training.run_folder import Run

MODEL_OPTIONS = (
    "cross_layers",
    "deep_layers",
    "embedding_dim",
    "structure",
    "dropout",
    "batch_norm",
    "l2",
    "backend",
    "crosses",
)


def make_plan(
    args: Namespace, name: str, cache: Cache, optimum: Mapping[str, float], seed: int, *, strict: bool = True
) -> dict[str, Any]:
    """Everything a run needs: what config.json holds. With ``strict``, an option that the model has not is an error."""
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    names = {field.name for field in fields(TrainingConfig)} - {"seed"}
    training = {name: value for name in names if (value := getattr(args, name)) is not None}
    return {
        "fastcross": __version__,
        "model": name,
        "options": model_options(args, name, cache.schema, strict),
        "training": vars(TrainingConfig(seed=seed, **training)),
        "sharding": args.sharding if getattr(args, "distributed", False) else None,
        "embedding": getattr(args, "embedding", "auto"),
        "device": args.device,
        "threads": args.threads or torch.get_num_threads(),
        "cache": str(cache.path.resolve()),
        "fingerprint": cache.fingerprint,
        "optimum": dict(optimum),
    }


def model_options(args: Namespace, name: str, schema: Schema, strict: bool) -> dict[str, Any]:
    """The options that were given; the others stay at the model's defaults."""
    given = {option: getattr(args, option) for option in MODEL_OPTIONS if getattr(args, option) is not None}
    known = {field.name for field in fields(MODELS[name].Config)} - ({"cross_layers"} if name != "dcn" else set())
    foreign = [f"--{option.replace('_', '-')}" for option in given if option not in known]
    if foreign and strict:
        raise ValueError(f"the model {name} has no {', '.join(foreign)}")
    options = {option: value for option, value in given.items() if option in known}
    if "crosses" in options:
        options["crosses"] = [[_position(schema, feature) for feature in cross] for cross in options["crosses"]]
    return options


def _position(schema: Schema, feature: str) -> int:
    if feature not in schema.categorical_names:
        raise ValueError(f"{feature!r} is not a categorical column; there are {', '.join(schema.categorical_names)}")
    return schema.categorical_names.index(feature)


def run_plan(
    cache: Cache, run: Run, show: Callable[[str], None] | None, *, resume: bool = False, ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Train what the run's plan describes, from the start or from where it stopped."""
    plan = run.config
    torch.set_num_threads(plan["threads"])
    config = TrainingConfig(**plan["training"])
    torch.manual_seed(config.seed)
    with torch.device("meta" if plan.get("sharding") else "cpu"):
        model = build(plan["model"], cache.schema, plan["options"])
    header = {
        "fastcross": __version__,
        "kind": plan["model"],
        "config": model.config.to_dict(),
        "schema": cache.schema.to_dict(),
        "cache": plan["cache"],
        "fingerprint": cache.fingerprint,
    }
    facts = {"parameters": count(model), "dense_parameters": count(model, embeddings=False)}
    if plan["optimum"]:
        facts["optimum"] = plan["optimum"]
    optimizer = None
    if plan.get("sharding"):
        from fastcross.distributed.model import shard  # TorchRec takes seconds to import

        model, optimizer = shard(model, ranks, config, plan["sharding"], plan.get("embedding", "auto"))
    else:
        model = model.to(choose_device(plan["device"]))
    trainer = Trainer(
        model, cache, config, run, header=header, facts=facts, show=show, ranks=ranks, optimizer=optimizer
    )
    if resume:
        trainer.resume()
    return trainer.fit()


def build(name: str, schema: Schema, options: Mapping[str, Any]) -> Model:
    """A model for the columns of a cache."""
    return MODELS[name](
        schema.cardinalities,
        len(schema.dense_names),
        bag_cardinalities=schema.bag_cardinalities,
        num_outputs=schema.num_outputs,
        **options,
    )


def count(model: Model, *, embeddings: bool = True) -> int:
    """Parameters; without the embedding layer as the paper counts them in section 4.4."""
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if embeddings or not name.startswith("embedding."))


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return torch.device(name)


@dataclass(frozen=True)
class Trained:
    """A model from a run folder, ready to predict, and what it was trained on."""

    model: Model
    schema: Schema
    cache: str
    fingerprint: str

    def open_cache(self, path: str | None = None) -> Cache:
        """The cache the model was trained on, or another with the same columns and vocabularies."""
        cache = Cache.open(path or self.cache, fingerprint=None if path else self.fingerprint)
        if cache.schema != self.schema:
            raise ValueError(f"the cache {cache.path} has other columns or vocabularies than the model was trained on")
        return cache


def _read_best(run: Run) -> dict[str, Any]:
    if not run.config.get("sharding"):
        return checkpoint.load(run.best)
    from fastcross.distributed.convert import newest, read_whole

    return read_whole(newest(run.path, "best"))


def load_model(path: Path | str, device: str = "auto") -> Trained:
    """The best model of a run folder, sharded or not, or of a best.safetensors file, in evaluation mode."""
    path = Path(path)
    state = _read_best(Run(path)) if path.is_dir() else checkpoint.load(path)
    if state.get("kind") not in MODELS:
        raise checkpoint.CheckpointError(f"{path} holds no model; use best.safetensors")
    model = MODELS[state["kind"]].from_config(state["config"])
    model.load_state_dict(state["model"])
    model.to(choose_device(device)).eval()
    return Trained(model, Schema.from_dict(state["schema"]), state["cache"], state["fingerprint"])
