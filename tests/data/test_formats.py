"""The registry of formats: cheap to look at, complete, and in the order that tells files apart."""

import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

pytest.importorskip("pyarrow")
from fastcross.data import DataError, formats, prepare
from fastcross.data.formats import FORMATS, detect_format, get_format
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
