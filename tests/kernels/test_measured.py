"""Tiles that a GPU was timed with: the file, what it is refused for, and how it overrules the model."""

import contextlib
import json
import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fastcross.cli.main import main
from fastcross.kernels.gpu import launch, measured
from fastcross.kernels.gpu.launch import Work
from fastcross.kernels.gpu.measured import Entry
from fastcross.models.dcn import DCN
from fastcross.plans import TUNED, Shape, parse_shapes, shape_of

GPU = "A GPU of 4,000 MHz"
WORK = Work(4, 4, 6, held=2, moved=3, sums=7, scalars=6)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def entry(d=1026, kind="backward", place=1):
    """The model's choice and, as the fastest, another of its candidates."""
    plans = launch.candidates(kind, d, WORK, launch.Hardware(132))
    key = launch.key_of(kind, d, WORK, True)
    return Entry("cross_network_bwd", dict(key), 4096, plans[place].tile, 2e-5, plans[0].tile, 3e-5)


def test_what_was_measured_is_read_at_first_use(folder, monkeypatch):
    path = measured.write(GPU, [entry()])
    assert path == folder / "fastcross" / "plans" / "A-GPU-of-4-000-MHz.json"
    properties = SimpleNamespace(name=GPU, multi_processor_count=132, warp_size=32, major=9, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = launch._look_up(torch.device("cuda"))
    model = launch.Hardware(132)
    assert launch.backward(1026, WORK, found).tile == entry().tile != launch.backward(1026, WORK, model).tile
    for other in ((1027, WORK), (1026, WORK._replace(layers=5)), (1026, WORK._replace(itemsize=2))):
        assert launch.backward(*other, found).tile == launch.backward(*other, model).tile
    assert launch.backward(1026, WORK, found, False).tile == launch.backward(1026, WORK, model, False).tile


def test_a_tile_that_the_planner_would_not_consider_is_not_taken():
    key = launch.key_of("backward", 1026, WORK, True)
    hardware = launch.Hardware(132, measured=measured.Measured({key: (3, 100, 1, 4, 5)}))
    assert launch.backward(1026, WORK, hardware).tile == launch.backward(1026, WORK, launch.Hardware(132)).tile


def test_other_shapes_stay_and_the_same_are_replaced():
    measured.write(GPU, [entry(), entry(d=390)])
    measured.write(GPU, [entry(place=0)])
    assert {e.shape["d"]: e.tile for e in measured.read(GPU)} == {1026: entry(place=0).tile, 390: entry(d=390).tile}


def test_no_file_is_no_news():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured.tiles_of(GPU) is None


def damaged(path, monkeypatch):
    path.write_bytes(path.read_bytes().replace(b"2e-05", b"1e-05"))


def of_another_device(path, monkeypatch):
    path.rename(measured.path_of("Another"))


def of_another_triton(path, monkeypatch):
    monkeypatch.setattr(measured.triton, "__version__", "99.0")


def of_another_fastcross(path, monkeypatch):
    plans = json.loads(path.read_text())["plans"]
    content = {"device": GPU, "triton": measured.triton.__version__, "plans": [plans[0] | {"colour": "red"}]}
    measured.write_checked_json(path, content)


def cut(path, monkeypatch):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (damaged, "checksum"),
        (cut, "damaged"),
        (of_another_device, f"device is Another here; the tiles were timed with {GPU}"),
        (of_another_triton, "triton is 99.0 here"),
        (of_another_fastcross, "another version of fastcross"),
    ],
)
def test_another_file_is_refused(how, told, monkeypatch):
    how(measured.write(GPU, [entry()]), monkeypatch)
    name = "Another" if how is of_another_device else GPU
    with pytest.warns(UserWarning, match=told):
        assert measured.tiles_of(name) is None
    measured.write(name, [entry(d=390)])  # it is replaced
    assert [e.shape["d"] for e in measured.read(name)] == [390]


def test_within_using_the_plans_are_others():
    device = torch.device("cpu")
    before = launch.hardware_of(device)
    tiles = measured.Measured({})
    with contextlib.suppress(KeyError), launch.using(device, tiles):
        assert launch.hardware_of(device).measured is tiles
        raise KeyError
    assert launch.hardware_of(device) is before


def test_shapes():
    found = parse_shapes(["64x30x3"])
    assert Shape("cross_network", 64, 30, 3, torch.bfloat16) in found
    assert Shape("cross_layer", 64, 30, 1) in found
    assert len(found) == 2 * len(TUNED)  # in two dtypes
    for wrong in ("64x30", "64x30xL", "0x30x3"):
        with pytest.raises(ValueError, match=wrong):
            parse_shapes([wrong])


def test_the_shape_of_a_run():
    model = DCN([5, 7], 3, 4, cross_layers=2, deep_layers=(8,), num_outputs=3)
    assert shape_of(model, 512) == Shape("cross_logits", 512, 11, 2, torch.float32, 3)
    stacked = DCN([5, 7], 3, 4, cross_layers=2, deep_layers=(8,), structure="stacked")
    assert shape_of(stacked, 512).operator == "cross_network"
    with pytest.raises(ValueError, match="cross_type vector"):
        shape_of(DCN([5], 3, 4, cross_layers=2, deep_layers=(8,), cross_type="matrix"), 512)


def test_without_a_gpu_nothing_is_timed(capsys):
    assert main(["doctor", "--device", "cpu", "--tune"]) != 0
    assert "--tune times the kernels of a GPU; got device cpu" in capsys.readouterr().err
