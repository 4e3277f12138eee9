"""Text tables: Criteo against a row-by-row reader written here and every kind of bad input; CSV as it is found, with
quoted line ends, long values, quotes in disorder, and lines that are still counted right."""

import csv
import gzip
import io
import math
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
from fastcross.data import DataError, prepare, read_for_prediction
from fastcross.data.formats.reading import records, sound_cut
from fastcross.data.generate import write_click_log


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.tsv"
    write_click_log(path, 2000, seed=3, largest_vocabulary=300)
    return path


@pytest.fixture
def blocks_of_50_kb(monkeypatch):
    """Many blocks from a small file, so that what spans them is exercised."""
    monkeypatch.setattr("fastcross.data.formats.text.BLOCK_BYTES", 50_000)


def everything(cache, part):
    return next(cache.batches(part, max(cache.sizes[part], 1)))


def by_hand(lines, min_frequency):
    """Dense, categorical texts and labels of Criteo's lines, and the vocabularies of the first 6/7, in plain Python.

    Dense: the logarithms standardised over the first 6/7, clipped to their range, then the flags of missing values."""
    rows = [line.split("\t") for line in lines]
    logs = [[math.copysign(math.log1p(abs(int(v))), int(v)) if v else math.nan for v in row[1:14]] for row in rows]
    x, first = np.array(logs), round(len(rows) * 6 / 7)
    mean, deviation = np.nanmean(x[:first], axis=0), np.nanstd(x[:first], axis=0)
    gaps = np.isnan(x[:first]).any(axis=0)
    clipped = np.clip(x, np.nanmin(x[:first], axis=0), np.nanmax(x[:first], axis=0))
    dense = np.concatenate([np.nan_to_num((clipped - mean) / deviation, nan=0.0), np.isnan(x)[:, gaps]], axis=1)
    train = rows[:first]
    counts = [Counter(row[14 + c] for row in train) for c in range(26)]
    return dense, [row[14:] for row in rows], [int(row[0]) for row in rows], counts


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_reader_matches_plain_python(log, tmp_path, blocks_of_50_kb, compressed):
    lines = log.read_text().splitlines()
    dense, texts, label, counts = by_hand(lines, 5)
    source = log
    if compressed:
        source = tmp_path / "log.gz"
        half = len(log.read_bytes()) // 2  # two gzip members, as `cat a.gz b.gz` makes them
        source.write_bytes(gzip.compress(log.read_bytes()[:half]) + gzip.compress(log.read_bytes()[half:]))
    cache = prepare(source, tmp_path / "cache", min_frequency=5)
    assert cache.sizes == {"train": 1714, "validation": 143, "test": 143}
    batch = everything(cache, "train")
    np.testing.assert_allclose(batch.dense.numpy(), dense[:1714], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.label.numpy(), label[:1714])
    for c in range(26):
        frequent = [value for value, count in counts[c].items() if count >= 5]
        assert cache.schema.cardinalities[c] == len(frequent) + 1
        id_of = {}
        for row, found in zip(texts, batch.categorical[:, c].tolist(), strict=False):
            assert (found == 0) == (row[c] not in frequent)
            assert id_of.setdefault(row[c], found) == found
        ids = sorted({i for i in id_of.values() if i})
        assert ids == list(range(1, len(frequent) + 1))
        by_id = {i: counts[c][value] for value, i in id_of.items() if i}
        assert all(by_id[i] >= by_id[i + 1] for i in ids[:-1]), "ids must follow frequency"


def test_validation_and_test_are_the_last_rows(log, tmp_path):
    cache = prepare(log, tmp_path / "cache", min_frequency=1)
    dense, _, _, _ = by_hand(log.read_text().splitlines(), 1)
    last = np.concatenate([everything(cache, part).dense.numpy() for part in ("validation", "test")])
    order = np.lexsort(last.T)
    expected = np.array(dense[1714:], np.float32)
    np.testing.assert_allclose(last[order], expected[np.lexsort(expected.T)], rtol=1e-5, atol=1e-6)


def edit(line: bytes, column: int, value: bytes) -> bytes:
    fields = line.split(b"\t")
    fields[column] = value
    return b"\t".join(fields)


BAD = {
    "too few columns": (lambda line: line.rsplit(b"\t", 1)[0], "expected 40 columns, got 39"),
    "too many columns": (lambda line: line + b"\tx", "expected 40 columns, got 41"),
    "not an integer": (lambda line: edit(line, 3, b"12x"), "column I3 must be an integer; got '12x'"),
    "a fraction": (lambda line: edit(line, 1, b"1.5"), "column I1 must be an integer; got '1.5'"),
    "beyond 64 bits": (lambda line: edit(line, 5, b"9" * 25), "column I5 must be an integer"),
    "not UTF-8": (lambda line: edit(line, 20, b"\xff\xfe"), "bytes that are not UTF-8"),
    "label 2": (lambda line: edit(line, 0, b"2"), r"label \(column label\) must be 0 or 1; got 2"),
    "no label": (lambda line: edit(line, 0, b""), "must be 0 or 1; got nothing"),
    "carriage return": (lambda line: edit(line, 30, b"ab\rcd"), "expected 40 columns"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_row_stops_with_file_and_line(log, tmp_path, blocks_of_50_kb, kind):
    spoil, message = BAD[kind]
    lines = log.read_bytes().splitlines()
    lines[1233] = spoil(lines[1233])
    log.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=rf"log\.tsv, line 1234: .*{message}"):
        prepare(log, tmp_path / "cache")
    assert [p.name for p in tmp_path.iterdir() if "cache" in p.name] == [], "nothing may be left behind"


def test_skipped_rows_are_counted_and_the_others_intact(log, tmp_path, blocks_of_50_kb):
    lines = log.read_bytes().splitlines()
    clean = b"\n".join(line for i, line in enumerate(lines) if i % 100 != 7) + b"\n"
    for number, i in enumerate(range(7, 2000, 100)):
        lines[i] = list(BAD.values())[number % len(BAD)][0](lines[i])
    log.write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "clean.tsv").write_bytes(clean)
    skipping = prepare(log, tmp_path / "cache", on_error="skip", min_frequency=2)
    expected = prepare(tmp_path / "clean.tsv", tmp_path / "clean", min_frequency=2)
    assert skipping.manifest["skipped"]["rows"] == 20
    assert "line 8: expected 40 columns, got 39" in skipping.manifest["skipped"]["examples"][0]
    for part in ("train", "validation", "test"):
        ours, theirs = everything(skipping, part), everything(expected, part)
        assert ours.dense.equal(theirs.dense)
        assert ours.categorical.equal(theirs.categorical)
        assert ours.label.equal(theirs.label)


def test_blank_lines_and_windows_line_ends(log, tmp_path):
    plain = prepare(log, tmp_path / "plain", min_frequency=2)
    log.write_bytes(log.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\n")
    windows = prepare(log, tmp_path / "windows", min_frequency=2)
    assert everything(windows, "train").categorical.equal(everything(plain, "train").categorical)
    lines = log.read_bytes().splitlines()
    lines[5] = edit(lines[5], 3, b"?")
    log.write_bytes(b"\n\n" + b"\n".join(lines))
    with pytest.raises(DataError, match="line 8: column I3"):  # blank lines count
        prepare(log, tmp_path / "cache")


def test_last_line_without_newline(log, tmp_path):
    log.write_bytes(log.read_bytes().rstrip(b"\n"))
    assert sum(prepare(log, tmp_path / "cache").sizes.values()) == 2000


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")], ids=["empty", "blank", "empty gzip"])
def test_empty_file(tmp_path, content):
    (tmp_path / "log.tsv").write_bytes(content)
    with pytest.raises(DataError, match=r"log\.tsv: (the file is empty|no rows)"):
        prepare(tmp_path / "log.tsv", tmp_path / "cache", format="criteo")


def test_truncated_gzip(log, tmp_path, blocks_of_50_kb):
    whole = gzip.compress(log.read_bytes())
    (tmp_path / "log.gz").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"log\.gz, line (\d+): the gzip stream is damaged or ends early") as stopped:
        prepare(tmp_path / "log.gz", tmp_path / "cache")
    line = int(str(stopped.value).split("line ")[1].split(":")[0])
    cache = prepare(tmp_path / "log.gz", tmp_path / "cache", on_error="skip")
    assert sum(cache.sizes.values()) == line - 1 > 1000
    assert cache.manifest["skipped"]["rows"] == 1


def test_damaged_gzip(log, tmp_path):
    whole = bytearray(gzip.compress(log.read_bytes()))
    whole[len(whole) // 2] ^= 255
    (tmp_path / "log.gz").write_bytes(whole)
    with pytest.raises(DataError, match=r"log\.gz, line \d+: "):
        prepare(tmp_path / "log.gz", tmp_path / "cache")


def test_wrong_format_is_said(tmp_path):
    (tmp_path / "table.csv").write_text("a,b\n" * 5000)
    with pytest.raises(DataError, match="not one row could be read"):
        prepare(tmp_path / "table.csv", tmp_path / "cache", format="criteo", on_error="skip")
    with pytest.raises(DataError, match="line 1: expected 40 columns, got 1"):
        prepare(tmp_path / "table.csv", tmp_path / "cache", format="criteo")
    with pytest.raises(DataError, match=r"absent\.tsv: No such file"):
        prepare(tmp_path / "absent.tsv", tmp_path / "cache")
    with pytest.raises(ValueError, match="format must be one of"):
        prepare(tmp_path / "table.csv", tmp_path / "cache", format="xls")


COLUMNS = {"label": "y", "categorical": ["c"], "dense": ["x"]}


@pytest.fixture
def blocks_of_500_bytes(monkeypatch):
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
def test_quoted_line_ends(tmp_path, blocks_of_500_bytes, line_end):
    texts = [f"a{line_end}b{i % 3}" if i % 2 else f'quoted "{i % 5}", so' for i in range(300)]
    path = write(tmp_path / "t.csv", [(i % 2, text, i / 3) for i, text in enumerate(texts)], line_end)
    cache = prepare(path, tmp_path / "c", columns=COLUMNS, split="time:1,0,0", min_frequency=1)
    assert values_of(cache, 300) == (texts, [i % 2 for i in range(300)])
    assert sum(len(batch) for batch in read_for_prediction(path, cache)) == 300


def test_lines_are_counted_through_quoted_line_ends(tmp_path, blocks_of_500_bytes):
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
def test_a_forgotten_quote_costs_one_row(tmp_path, blocks_of_500_bytes, line, reason, others):
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


def test_quotes_inside_a_value_are_text(tmp_path, blocks_of_500_bytes):
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
