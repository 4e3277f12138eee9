"""Criteo's format: the reader against a row-by-row one written here, and every kind of bad input."""

import gzip
import math
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from fastcross.data import DataError, prepare
from fastcross.data.generate import write_click_log


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.tsv"
    write_click_log(path, 2000, seed=3, largest_vocabulary=300)
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks from a small file, so that what spans them is exercised."""
    monkeypatch.setattr("fastcross.data.formats.text.BLOCK_BYTES", 50_000)


def everything(cache, part):
    return next(cache.batches(part, max(cache.sizes[part], 1)))


def by_hand(lines, min_frequency):
    """Dense, categorical texts and labels of Criteo's lines, and the vocabularies of the first 6/7, in plain Python."""
    rows = [line.split("\t") for line in lines]
    transform = [[math.copysign(math.log1p(abs(int(v))), int(v)) if v else 0.0 for v in row[1:14]] for row in rows]
    train = rows[: round(len(rows) * 6 / 7)]
    counts = [Counter(row[14 + c] for row in train) for c in range(26)]
    return transform, [row[14:] for row in rows], [int(row[0]) for row in rows], counts


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_reader_matches_plain_python(log, tmp_path, small_blocks, compressed):
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
    np.testing.assert_allclose(batch.dense.numpy(), np.array(dense[:1714]), rtol=1e-6)
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
    np.testing.assert_allclose(last[order], expected[np.lexsort(expected.T)], rtol=1e-6)


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
def test_bad_row_stops_with_file_and_line(log, tmp_path, small_blocks, kind):
    spoil, message = BAD[kind]
    lines = log.read_bytes().splitlines()
    lines[1233] = spoil(lines[1233])
    log.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=rf"log\.tsv, line 1234: .*{message}"):
        prepare(log, tmp_path / "cache")
    assert [p.name for p in tmp_path.iterdir() if "cache" in p.name] == [], "nothing may be left behind"


def test_skipped_rows_are_counted_and_the_others_intact(log, tmp_path, small_blocks):
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


def test_truncated_gzip(log, tmp_path, small_blocks):
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
