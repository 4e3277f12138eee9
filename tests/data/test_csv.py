"""CSV as it is found: quoted line ends, long values, quotes in disorder, and lines that are still counted right."""

import csv
import io
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
from fastcross.data import DataError, prepare, read_for_prediction
from fastcross.data.formats.reading import records, sound_cut

COLUMNS = {"label": "y", "categorical": ["c"], "dense": ["x"]}


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks from a small file, so that what spans them is exercised."""
    monkeypatch.setattr("fastcross.data.formats.text.BLOCK_BYTES", 500)


def write(path, rows, line_end="\n"):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator=line_end)
        writer.writerow(["y", "c", "x"])
        writer.writerows(rows)
    return path


def values_of(cache, rows):
    """The texts and numbers behind the training part."""
    (batch,) = cache.batches("train", rows)
    texts = cache.encoder.categorical[0].values.to_pylist()
    return [texts[i - 1] for i in batch.categorical[:, 0]], batch.label.tolist()


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_quoted_line_ends(tmp_path, small_blocks, line_end):
    texts = [f"a{line_end}b{i % 3}" if i % 2 else f'quoted "{i % 5}", so' for i in range(300)]
    path = write(tmp_path / "t.csv", [(i % 2, text, i / 3) for i, text in enumerate(texts)], line_end)
    cache = prepare(path, tmp_path / "c", columns=COLUMNS, split="time:1,0,0", min_frequency=1)
    assert values_of(cache, 300) == (texts, [i % 2 for i in range(300)])
    assert sum(len(batch) for batch in read_for_prediction(path, cache)) == 300


def test_lines_are_counted_through_quoted_line_ends(tmp_path, small_blocks):
    rows = [(i % 2, "one\ntwo\nthree", "oops" if i == 200 else i / 3) for i in range(300)]
    path = write(tmp_path / "t.csv", rows)
    with pytest.raises(DataError, match=r"t\.csv, line 602: column x must be a number; got 'oops'"):
        prepare(path, tmp_path / "c", columns=COLUMNS)
    cache = prepare(path, tmp_path / "c", columns=COLUMNS, on_error="skip")
    assert sum(cache.sizes.values()) == 299


@pytest.mark.parametrize("text", ["z" * 5_000_000, "z, and\n" * 700_000], ids=["one line", "many lines"])
def test_values_of_five_megabytes(tmp_path, text):
    path = write(tmp_path / "t.csv", [(i % 2, text if i == 7 else f"v{i % 3}", i / 3) for i in range(50)])
    cache = prepare(path, tmp_path / "c", columns=COLUMNS, split="time:1,0,0", min_frequency=1)
    assert values_of(cache, 50)[0][7] == text
    assert cache.encoder.categorical[0].cardinality == 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('1,"a,3', "a quote is opened and never closed"),
        ('1,"a"b,3', "a closing quote is followed by 'b'"),
        ('1,"a",3,4', "expected 3 columns, got 4"),
        ('1,"a"', "expected 3 columns, got 2"),
        ('"1,a,3', "a quote is opened and never closed"),
    ],
)
@pytest.mark.parametrize("others", ["plain", "quoted"])
def test_a_forgotten_quote_costs_one_row(tmp_path, small_blocks, line, reason, others):
    c = {"plain": "b", "quoted": '"b\nb"'}[others]
    lines = [f"{i % 2},{c},{i}" for i in range(100)]
    lines[40] = line
    (tmp_path / "t.csv").write_text("y,c,x\n" + "\n".join(lines) + "\n")
    number = 42 if others == "plain" else 82
    if others == "quoted" and "never closed" in reason:
        reason = "a closing quote is followed by 'b'"  # the next quote in the file is taken for the closing one
    with pytest.raises(DataError, match=rf"line {number}: {reason}"):
        prepare(tmp_path / "t.csv", tmp_path / "c", columns=COLUMNS)
    cache = prepare(tmp_path / "t.csv", tmp_path / "c", columns=COLUMNS, on_error="skip", split="time:1,0,0")
    assert cache.sizes["train"] == 99
    assert cache.manifest["skipped"]["rows"] == 1


def test_quotes_inside_a_value_are_text(tmp_path, small_blocks):
    lines = [f'{i % 2},{i % 3}" disk,{i}' for i in range(100)]
    (tmp_path / "t.csv").write_text("y,c,x\n" + "\n".join(lines) + "\n")
    cache = prepare(tmp_path / "t.csv", tmp_path / "c", columns=COLUMNS, split="time:1,0,0", min_frequency=1)
    assert values_of(cache, 100)[0] == [f'{i % 3}" disk' for i in range(100)]


TEXT = st.text(st.sampled_from('ab,"\n\r |é'), max_size=8)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=30), st.integers(20, 400))
@settings(deadline=None, max_examples=300)
def test_records_are_those_of_pythons_reader(rows, block_bytes):
    """Every cut of a sound text lies between records, wherever the text is broken off."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    data = buffer.getvalue().encode()
    found = list(records(data, b",", b'"', 3))
    assert not any(record.problem for record in found)
    texts = [data[record.start : record.end].decode() for record in found]
    assert [next(csv.reader(io.StringIO(text, newline=""))) for text in texts] == [list(row) for row in rows]
    ends = {0, *(record.end for record in found)}
    for stop in range(0, len(data), 7):
        cut = sound_cut(data[:stop], b",", b'"')
        assert cut is not None
        assert cut[0] == max(end for end in ends if end <= stop)
        assert cut[1] == sum(record.end <= stop for record in found)


def test_header_of_several_lines(tmp_path):
    (tmp_path / "t.csv").write_text('\n"y","c\nc",x\n' + "".join(f"{i % 2},a{i % 3},{i / 3}\n" for i in range(99)))
    cache = prepare(tmp_path / "t.csv", tmp_path / "c")
    assert cache.schema.categorical_names == ("c\nc",)
    assert sum(cache.sizes.values()) == 99


def test_a_header_that_only_begins_like_the_first_files(tmp_path):
    write(tmp_path / "a.csv", [(i % 2, "c", i / 3) for i in range(20)])
    (tmp_path / "b.csv").write_text("y,c,xx\n1,c,3\n")
    with pytest.raises(DataError, match=r"b\.csv, line 1: the header must be that of the first file; got y,c,xx"):
        prepare([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"y,x\r1,2\r0,3\r", "line 1: not the header of a table"),
        ("y,x\n1,2\n".encode("utf-16"), "line 1: bytes that are not UTF-8"),
        (b"y,,\n1,2,3\n", r"names a column twice: \(without a name\)"),
        (b"y,x\n1,2\n0,\xe9\n1,3\n0,4\n", "line 3: "),
        (b"\n\n\n", "the file is empty"),
        (np.random.default_rng(0).bytes(5000), "t.csv"),
    ],
)
def test_what_is_no_table(tmp_path, content, message):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "t.csv", tmp_path / "c")


def test_files_that_cannot_be_read_twice_or_at_all(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    for magic, name in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh91AY", "bzip2"), (b"PK\x03\x04", "zip")):
        (tmp_path / "t.csv").write_bytes(magic + bytes(100))
        with pytest.raises(DataError, match=rf"t\.csv: compressed with {name}; text is read plain or with gzip"):
            prepare(tmp_path / "t.csv", tmp_path / "c")
    for path in (tmp_path / "pipe.csv", "/dev/null"):
        with pytest.raises(DataError, match="not a file on disk"):
            prepare(path, tmp_path / "c")


@pytest.mark.parametrize("content", [np.random.default_rng(0).bytes(5000), b"PAR1", b"PAR1" * 10])
def test_what_is_no_parquet(tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"t\.parquet: not a readable Parquet file"):
        prepare(tmp_path / "t.parquet", tmp_path / "c")
