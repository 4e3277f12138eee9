"""The registry of formats: cheap to look at, complete, in the order that tells files apart; Covertype, Higgs and Adult,
small files in their formats, and the real ones where they are at hand."""

import importlib.util
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from fastcross.data import DataError, formats, prepare, read_for_prediction
from fastcross.data.formats import FORMATS
from fastcross.data.formats.reading import detect_format, get_format
from fastcross.data.generate import write_click_log

METHODS = ("recognises", "open", "open_for_prediction")


def test_every_format_has_its_name():
    modules = [import_module(f"{formats.__name__}.{file.name}") for file in pkgutil.iter_modules(formats.__path__)]
    values = [value for module in modules for value in vars(module).values() if not isinstance(value, type)]
    made = [value for value in values if all(hasattr(value, method) for method in METHODS)]
    assert sorted(map(id, made)) == sorted(id(get_format(name)) for name in FORMATS)
    with pytest.raises(ValueError, match=r"format must be one of auto, .*csv; got 'xls'"):
        get_format("xls")


def test_their_names_cost_nothing():
    """The command line shows them in its help; `import fastcross` brings no data code at all."""
    code = (
        "import sys, fastcross\n"
        "assert not [name for name in sys.modules if name.startswith('fastcross.data')]\n"
        "from fastcross.data.formats import FORMATS\n"
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.csv", b"a,b\n1,2\n", "csv"),
        ("a.txt", b"PAR1....", "parquet"),
        ("a.parquet", b"random bytes", "parquet"),
        ("a.data", b"39, State-gov, 7, B, 13, N, A, N, W, M, 2, 0, 40, C, <=50K\n", "adult"),
        ("a.test", b"|1x3 Cross validator\n", "adult"),
        ("a.csv", b",".join([b"1"] * 55) + b"\n", "covertype"),
        ("a.csv", b",".join([b"1.0"] * 29) + b"\n", "higgs"),
        ("a.tsv", b"label\t" + b"\t".join([b"x"] * 39) + b"\n", "csv"),
    ],
)
def test_detected(tmp_path, name, content, format):
    (tmp_path / name).write_bytes(content)
    assert detect_format(tmp_path / name) == format


def test_fixed_columns_are_fixed(tmp_path):
    write_click_log(tmp_path / "log.tsv", 100)
    assert detect_format(tmp_path / "log.tsv") == "criteo"
    for arguments in ({"columns": "label"}, {"time_column": "I1"}):
        with pytest.raises(DataError, match='format "criteo" has fixed columns'):
            prepare(tmp_path / "log.tsv", tmp_path / "cache", **arguments)
    assert "columns: those of the format criteo" in prepare(tmp_path / "log.tsv", tmp_path / "cache").report


REAL = Path(os.environ.get("FASTCROSS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def everything(cache, part="train"):
    return next(cache.batches(part, max(cache.sizes[part], 1)))


def covertype_lines(rows, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(rows):
        numbers = rng.integers(-50, 3000, 10)
        flags = np.zeros(44, int)
        flags[[rng.integers(4), 4 + rng.integers(40)]] = 1
        yield ",".join(map(str, [*numbers, *flags, rng.integers(1, 8)]))


@pytest.mark.parametrize("header", [False, True])
def test_covertype(tmp_path, header):
    lines = list(covertype_lines(200))
    from fastcross.data.formats.text import FLAGS, NUMBERS

    first = ",".join((*NUMBERS, *FLAGS, "Cover_Type")) + "\n" if header else ""
    (tmp_path / "covtype.csv").write_text(first + "\n".join(lines) + "\n")
    cache = prepare(tmp_path / "covtype.csv", tmp_path / "cache", split="time:1,0,0")
    assert cache.manifest["configuration"]["format"] == "covertype"
    assert (cache.schema.num_outputs, cache.schema.task) == (7, "multiclass")
    assert cache.schema.cardinalities == ()
    batch = everything(cache)
    raw = np.array([line.split(",") for line in lines], float)
    expected = (raw[:, :10] - raw[:, :10].mean(axis=0)) / raw[:, :10].std(axis=0)
    np.testing.assert_allclose(batch.dense[:, :10].numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(batch.dense[:, 10:].numpy(), raw[:, 10:54])
    np.testing.assert_array_equal(batch.label.numpy(), raw[:, 54] - 1)
    assert batch.categorical.shape == (200, 0)


def test_covertype_label_out_of_range(tmp_path):
    lines = list(covertype_lines(20))
    lines[12] = lines[12].rsplit(",", 1)[0] + ",8"
    (tmp_path / "covtype.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"line 13: the label \(column Cover_Type\) must be 1 or 2 .* or 7; got 8"):
        prepare(tmp_path / "covtype.csv", tmp_path / "cache")


def test_higgs(tmp_path):
    raw = np.random.default_rng(0).normal(size=(100, 29))
    raw[:, 0] = raw[:, 0] > 0
    np.savetxt(tmp_path / "higgs.csv", raw, delimiter=",")  # labels are spelt 1.000000000000000000e+00
    cache = prepare(tmp_path / "higgs.csv", tmp_path / "cache", split="time:1,0,0")
    assert cache.manifest["configuration"]["format"] == "higgs"
    batch = everything(cache)
    np.testing.assert_array_equal(batch.label.numpy(), raw[:, 0])
    expected = (raw[:, 1:] - raw[:, 1:].mean(axis=0)) / raw[:, 1:].std(axis=0)
    np.testing.assert_allclose(batch.dense.numpy(), expected, atol=1e-5)
    np.savetxt(tmp_path / "new.csv", raw[:, 1:], delimiter=",")
    assert next(iter(read_for_prediction(tmp_path / "new.csv", cache))).dense.equal(batch.dense)


ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba"
)


def test_adult(tmp_path):
    missing = ADULT.replace("State-gov", "?")
    other = ADULT.replace("State-gov", "Private").replace("39", "20", 1)
    (tmp_path / "adult.data").write_text(
        "\n".join([f"{ADULT}, <=50K", f"{missing}, >50K", f"{other}, >50K"] * 20) + "\n\n"
    )
    (tmp_path / "adult.test").write_text(f"|1x3 Cross validator\n{missing}, <=50K.\n{ADULT}, >50K.\n\n")
    files = [tmp_path / "adult.data", tmp_path / "adult.test"]
    cache = prepare(files, tmp_path / "cache", split="files:1,0,0", min_frequency=1)
    assert cache.sizes == {"train": 60, "validation": 0, "test": 2}
    assert cache.schema.dense_names == (
        "age",
        "fnlwgt",
        "education-num",
        "capital-gain",
        "capital-loss",
        "hours-per-week",
    )
    assert cache.schema.cardinalities == (4, 2, 2, 2, 2, 2, 2, 2)
    train, test = everything(cache), everything(cache, "test")
    assert train.label.tolist() == [0, 1, 1] * 20
    assert test.label.tolist() == [0, 1]
    assert test.categorical[0].tolist() == train.categorical[1].tolist()
    assert test.categorical[1].tolist() == train.categorical[0].tolist()
    assert len(set(train.categorical[:3, 0].tolist())) == 3
    assert cache.encoder.numbers.records[3].log
    assert cache.encoder.numbers.undone(3, train.dense[0, 3].item()) == pytest.approx(2174)
    assert train.dense[:, 0].mean().item() == pytest.approx(0, abs=1e-6)
    assert (train.dense[:, 1] == 0).all(), "a constant column becomes 0"
    spoilt = tmp_path / "adult.test"
    spoilt.write_text(f"|1x3 Cross validator\n{ADULT}, maybe\n")
    with pytest.raises(DataError, match=r"adult\.test, line 2: .* must be <=50K or >50K; got maybe"):
        prepare(files, tmp_path / "cache", split="files")


def real(*names):
    paths = [REAL / name for name in names]
    if not all(path.exists() for path in paths):
        pytest.skip("real data not at hand (set FASTCROSS_DATA to its folder)")
    return paths


def test_real_covertype(tmp_path):
    cache = prepare(real("covtype.csv.gz"), tmp_path / "cache", split=(0.9, 0, 0.1))
    assert cache.sizes == {"train": 522911, "validation": 0, "test": 58101}
    batch = everything(cache, "test")
    assert batch.dense.shape == (58101, 54)
    assert (batch.dense[:, 10:14].sum(dim=1) == 1).all()
    assert (batch.dense[:, 14:].sum(dim=1) == 1).all()
    assert batch.dense[:, :10].std(dim=0).sub(1).abs().max() < 0.05
    share = np.bincount(batch.label.numpy(), minlength=7) / 58101
    np.testing.assert_allclose(share, np.array([211840, 283301, 35754, 2747, 9493, 17367, 20510]) / 581012, atol=0.005)


def test_real_higgs(tmp_path):
    cache = prepare(real("higgs-train.csv.gz", "higgs-test.csv.gz"), tmp_path / "cache", split="files")
    assert cache.sizes == {"train": 9000, "validation": 1000, "test": 2000}
    assert everything(cache).dense.shape == (9000, 28)
    assert everything(cache).label.mean().item() == pytest.approx(0.53, abs=0.03)


def test_real_adult(tmp_path):
    files = real("adult.data.gz", "adult.test.gz")
    assert [detect_format(path) for path in files] == ["adult", "adult"]
    cache = prepare(files, tmp_path / "cache", split="files", min_frequency=1)
    assert cache.sizes == {"train": 29305, "validation": 3256, "test": 16281}
    assert everything(cache, "test").label.mean().item() == pytest.approx(3846 / 16281)
    assert cache.schema.cardinalities[5:7] == (6, 3)  # race and sex are never missing


def kinds_of(cache):
    return {found["column"]: found["kind"] for found in cache.manifest["findings"]}


def test_real_covertype_without_its_format(tmp_path):
    """As any table with a header: ten quantities, among them distances on a grid, and flags."""
    cache = prepare(real("covtype.csv.gz"), tmp_path / "cache", format="csv", columns="Cover_Type", split="random")
    kinds = kinds_of(cache)
    assert [kinds[name] for name in list(kinds)[:10]] == ["dense"] * 10
    assert {kinds[name] for name in list(kinds)[10:]} == {"categorical"}
    assert cache.encoder.classes == ("1", "2", "3", "4", "5", "6", "7")


def test_real_movielens_without_telling_names(tmp_path):
    """MovieLens-100K, which RecBole brings: users and movies are ids, though they are called a, b, …."""
    recbole = importlib.util.find_spec("recbole")
    if recbole is None:
        pytest.skip("RecBole is not installed")
    folder = Path(recbole.origin).parent / "dataset_example" / "ml-100k"

    def read(kind):
        return [line.split("\t") for line in (folder / f"ml-100k.{kind}").read_text().splitlines()[1:]]

    users = {user: rest for user, *rest in read("user")}
    genres = {movie: rest[-1].replace(" ", "|") for movie, *rest in read("item")}
    with open(tmp_path / "table.csv", "w") as file:
        file.write("a,b,label,time,age,gender,work,zip,genres\n")
        for user, movie, rating, time in read("inter"):
            file.write(f"{user},{movie},{int(float(rating) >= 4)},{time},{','.join(users[user])},{genres[movie]}\n")
    cache = prepare(tmp_path / "table.csv", tmp_path / "cache", split="time", time_column="time")
    kinds = dict.fromkeys(("a", "b", "gender", "work", "zip"), "categorical")
    kinds |= {"age": "dense", "genres": "multi-valued", "time": "dropped"}
    assert kinds_of(cache) == kinds
