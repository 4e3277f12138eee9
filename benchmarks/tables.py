"""The estimators' defaults on real tables, beside LightGBM's, scikit-learn's and DeepCTR-Torch's.

    python -m benchmarks.tables                       # writes benchmarks/results/tables.json and docs/estimators.md
    python -m benchmarks.tables --only digits,wine    # measures these again, and keeps the others

A fifth of the rows tests: on three splits of a table below 5,000 rows, on one of a larger one. All have their defaults.
For scikit-learn's linear models and its MLP, numbers are standardised, gaps are the mean, and categories are one-hot.
LightGBM takes categories as such, HistGradientBoosting codes of them. Seconds are CPU seconds of fit, with one thread.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import accuracy_score, r2_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

from benchmarks.harness.machine import machine, versions
from benchmarks.workloads.real_tables import TABLES, Missing, RealTable

FILE = Path(__file__).parent / "results" / "tables.json"
PAGE = Path(__file__).parents[1] / "docs" / "estimators.md"
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
SMALL = 5_000  # rows below which three splits are measured
OURS = "fastcross"


def ours(preset: str) -> Callable[..., Any]:
    def make(regression: bool, categories: list[str], seed: int) -> Any:
        from fastcross import DCNClassifier, DCNRegressor

        estimator: Any = DCNRegressor if regression else DCNClassifier
        return estimator(preset=preset, threads=1, random_state=seed)

    return make


def one_hot(model: Any, categories: list[str]) -> Any:
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    codes = OneHotEncoder(handle_unknown="ignore", min_frequency=3)
    return make_pipeline(make_column_transformer((codes, categories), remainder=numbers), model)


def linear(regression: bool, categories: list[str], seed: int) -> Any:
    return one_hot(RidgeCV(np.logspace(-2, 3, 11)) if regression else LogisticRegression(max_iter=1000), categories)


def mlp(regression: bool, categories: list[str], seed: int) -> Any:
    return one_hot((MLPRegressor if regression else MLPClassifier)(random_state=seed), categories)


def histogram(regression: bool, categories: list[str], seed: int) -> Any:
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=np.nan, encoded_missing_value=np.nan)
    kind = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    return make_pipeline(make_column_transformer((codes, categories), remainder="passthrough"), kind(random_state=seed))


class LightGBM:
    def __init__(self, regression: bool, categories: list[str], seed: int) -> None:
        import lightgbm

        kind = lightgbm.LGBMRegressor if regression else lightgbm.LGBMClassifier
        self.model, self.categories = kind(verbose=-1, n_jobs=1, random_state=seed), categories

    def fit(self, X: pd.DataFrame, y: pd.Series) -> "LightGBM":
        self.types = {name: pd.CategoricalDtype(sorted(X[name].dropna().unique())) for name in self.categories}
        self.model.fit(X.astype(self.types), y)
        return self

    def predict(self, X: pd.DataFrame) -> Any:
        return self.model.predict(X.astype(self.types))

    def predict_proba(self, X: pd.DataFrame) -> Any:
        return self.model.predict_proba(X.astype(self.types))


CONTESTANTS: dict[str, Callable[..., Any]] = {
    OURS: ours("data"),
    'preset="paper"': ours("paper"),
    "LightGBM": LightGBM,
    "HistGradientBoosting": histogram,
    "MLP": mlp,
    "linear": linear,
}


def score(metric: str, model: Any, X: pd.DataFrame, y: pd.Series) -> float:
    if metric == "auc":
        return float(roc_auc_score(y, model.predict_proba(X)[:, 1]))
    return float((accuracy_score if metric == "accuracy" else r2_score)(y, model.predict(X)))


def measure(name: str, names: list[str]) -> dict[str, Any]:
    """Scores and CPU seconds of the contestants on one table, a number for each split."""
    entry: RealTable = TABLES[name]
    table = entry.load()
    table = table.sample(entry.rows, random_state=0) if len(table) > entry.rows else table
    X, y = table.drop(columns="label").reset_index(drop=True), table.label.reset_index(drop=True)
    categories = [column for column in X if X[column].dtype.kind not in "ifub"]
    found: dict[str, Any] = {"metric": entry.metric, "chosen": entry.chosen, "rows": len(X), "columns": X.shape[1]}
    found |= {"categories": len(categories), "scores": {each: [] for each in names}}
    found["seconds"] = {each: [] for each in names}
    for seed in range(3 if len(X) < SMALL else 1):
        strata = None if entry.metric == "r2" else y
        X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=strata)
        for each in names:
            model = CONTESTANTS[each](entry.metric == "r2", categories, seed)
            begun = time.process_time()
            model.fit(X_train, y_train)
            found["seconds"][each].append(round(time.process_time() - begun, 3))
            found["scores"][each].append(round(score(entry.metric, model, X_test, y_test), 5))
    return found


def table_of(results: dict[str, Any], chosen: bool) -> str:
    """Markdown: mean scores, the best of a row in bold, and CPU seconds of our fit and LightGBM's."""
    head = ["table", "rows", "metric", *CONTESTANTS]
    lines = [f"| {' | '.join(head)} |", "|---|---:|---|" + "---:|" * len(CONTESTANTS)]
    for name, found in results.items():
        if found["chosen"] != chosen:
            continue
        means = {each: mean(values) for each, values in found["scores"].items() if values}
        cells = []
        for each in CONTESTANTS:
            if each not in means:
                cells.append("–")
                continue
            text = f"{means[each]:.3f}"
            text = f"**{text}**" if text == f"{max(means.values()):.3f}" else text
            cells.append(f"{text} ({mean(found['seconds'][each]):.1f})")
        metric = {"auc": "AUC", "accuracy": "accuracy", "r2": "R²"}[found["metric"]]
        lines.append(f"| {name} | {found['rows']:,} | {metric} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(results: dict[str, Any]) -> list[str]:
    """How far behind whom, on the tables that the defaults were not chosen on."""
    shown = {
        name: {each: mean(values) for each, values in found["scores"].items() if values}
        for name, found in results.items()
        if not found["chosen"]
    }
    lines = []
    for rival in ("LightGBM", "MLP", "linear"):
        gaps = {name: scores[OURS] - scores[rival] for name, scores in shown.items() if rival in scores}
        if gaps:
            worst = min(gaps, key=gaps.__getitem__)
            ahead = sum(gap > 0 for gap in gaps.values())
            lines.append(
                f"- {rival}: ahead on {ahead} of {len(gaps)}; the worst gap is {gaps[worst]:+.3f}, on {worst}."
            )
    return lines


def page(content: dict[str, Any]) -> str:
    results = {name: content["tables"][name] for name in TABLES if name in content["tables"]}
    return "\n".join(
        [
            BEGIN,
            "",
            "Tables that the defaults were **not** chosen on (score, and in brackets CPU seconds of `fit`):",
            "",
            table_of(results, chosen=False),
            "",
            "fastcross against each, on these tables:",
            "",
            *verdict(results),
            "",
            "Tables that the defaults were chosen on, which say less:",
            "",
            table_of(results, chosen=True),
            "",
            END,
        ]
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="tables, with commas between them")
    parser.add_argument("--contestants", help="who takes part, with commas between them")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that the others have not converged is in their scores
    names = args.contestants.split(",") if args.contestants else [*CONTESTANTS]
    content = json.loads(args.output.read_text()) if args.output.exists() else {"tables": {}}
    for name in args.only.split(",") if args.only else TABLES:
        try:
            found = measure(name, names)
        except (Missing, ModuleNotFoundError) as error:
            print(f"{name}: left out, for {error} is not here", flush=True)
            continue
        before = content["tables"].get(name)
        if before:  # contestants that were not asked for keep their figures
            for kind in ("scores", "seconds"):
                found[kind] = before[kind] | found[kind]
        content["tables"][name] = found
        print(name, {each: round(mean(values), 4) for each, values in found["scores"].items()}, flush=True)
        content |= {"machine": {**machine(), **versions()}}
        args.output.write_text(json.dumps(content, indent=1) + "\n")
    if args.output == FILE and BEGIN in PAGE.read_text():
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN)] + page(content) + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    main()
