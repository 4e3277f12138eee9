"""What a layer records of wrong ids: true of one batch, never lost, and never of a layer that met none.

On a GPU, or in Triton's interpreter, where ``test_triton_interpreter.py`` runs this file.
"""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from triton_place import MARKS

from fastcross.batch import Bag
from fastcross.layers.embedding import EmbeddingStack

pytestmark = MARKS
FAULT = "feature 0 has 5 ids, 0 to 4; got id 9 in row 1"


def make(place):
    return EmbeddingStack([5], 0, 2, backend="triton").to(place)


def call(stack, last=9):
    """Two rows, of which the second has the id ``last``."""
    place = stack.tables[0].device
    return stack(torch.zeros(2, 0, device=place), torch.tensor([[0], [last]], device=place))


def assert_records(stack):
    """Nothing is recorded now; a wrong id is, and raised once."""
    stack.raise_faults()
    call(stack, 4)
    stack.raise_faults()
    assert call(stack)[1].isnan().all()
    with pytest.raises(ValueError, match=FAULT):
        stack.raise_faults()
    stack.raise_faults()


def emptied(stack, place):
    return stack.to("meta").to_empty(device=place)


def averaged(stack, place):
    model = AveragedModel(stack, use_buffers=True)
    for _ in range(3):
        model.update_parameters(stack)
    return model.module


def built_on_meta(stack, place):
    with torch.device("meta"):
        skeleton = EmbeddingStack([5], 0, 2, backend="triton")
    skeleton.raise_faults()
    skeleton.load_state_dict(stack.state_dict(), assign=True)
    return skeleton


def saved(stack, place):
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def broadcast(stack, place):
    """As DistributedDataParallel does, from a rank that met a wrong id."""
    call(other := make(place))
    for mine, theirs in zip(stack.buffers(), other.buffers(), strict=True):
        mine.copy_(theirs)
    return stack


def moved_in_inference_mode(stack, place):
    with torch.inference_mode():
        return make(place)


WAYS = {
    "to_empty": emptied,
    "averaged": averaged,
    "assigned": built_on_meta,
    "broadcast": broadcast,
    "deepcopy": lambda stack, place: copy.deepcopy(stack),
    "pickled": lambda stack, place: pickle.loads(pickle.dumps(stack)),
    "saved": saved,
    "half": lambda stack, place: stack.half(),
    "type": lambda stack, place: stack.type(torch.float16),
    "there and back": lambda stack, place: stack.double().to("meta").to_empty(device=place).float(),
    "inference mode": moved_in_inference_mode,
    "reset": lambda stack, place: stack.reset_parameters() or stack,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_met_nothing_has_nothing_to_tell(way, device):
    stack = WAYS[way](make(device), device)
    assert_records(stack)
    assert [*stack.state_dict()] == ["tables.0"]
    assert not list(stack.buffers())  # which others average, broadcast, cast and leave empty


@pytest.mark.parametrize("way", ["averaged", "deepcopy", "pickled", "saved"])
def test_a_copy_has_met_nothing_and_the_original_still_tells(way, device):
    call(stack := make(device))
    made = WAYS[way](stack, device)
    assert_records(made)
    with pytest.raises(ValueError, match=FAULT):
        stack.raise_faults()


@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack.half(),
        lambda stack: stack.to(stack.tables[0].device),
        lambda stack: stack.to_empty(device=stack.tables[0].device),
        lambda stack: stack.reset_parameters(),
        lambda stack: stack.load_state_dict(stack.state_dict()),
        lambda stack: stack.load_state_dict(stack.state_dict(), assign=True),
        lambda stack: AveragedModel(stack, use_buffers=True).update_parameters(stack),
        copy.deepcopy,
    ],
)
def test_what_is_recorded_stays_where_it_is(change, device):
    """Where a CUDA graph would write it, too."""
    call(stack := make(device))
    place = stack.faults.data_ptr()
    change(stack)
    assert stack.faults.data_ptr() == place
    with pytest.raises(ValueError, match=FAULT):
        stack.raise_faults()
    assert stack.faults.data_ptr() == place


@pytest.mark.parametrize("buffer", [False, True])
def test_a_pickle_from_before_there_was_a_record(buffer, device):
    stack, state = make(device), {}
    if buffer:  # or from when it was a buffer
        del stack.faults
        stack.register_buffer("faults", torch.zeros(1, dtype=torch.int64, device=device), persistent=False)
    state = {name: value for name, value in vars(stack).items() if name != "faults"}
    old = EmbeddingStack.__new__(EmbeddingStack)
    old.__setstate__(state)
    assert_records(old)
    assert not list(old.buffers())


def test_tables_that_are_nowhere_have_nothing_to_tell():
    stack = make("meta")
    call(stack)
    stack.raise_faults()


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("making", [True, False])
def test_inference_mode_loses_nothing(making, recording, reading, device):
    def mode(chosen):
        return torch.inference_mode() if chosen else contextlib.nullcontext()

    with mode(making):
        stack = make(device).requires_grad_(False)
    for _ in range(2):
        with mode(recording):
            call(stack)
        with mode(reading), pytest.raises(ValueError, match=FAULT):
            stack.raise_faults()


def test_a_layer_without_tables_waits_for_nothing(device, monkeypatch):
    stack = EmbeddingStack([], 3, backend="triton").to(device)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda _: pytest.fail("waits for the device"))
    assert torch.equal(
        stack(torch.ones(2, 3, device=device), torch.zeros(2, 0, device=device).long()).cpu(), torch.ones(2, 3)
    )


def test_a_fault_is_told_of_one_batch(device):
    """Offsets of two batches: what was found in one does not go with the number of values of the other."""
    stack = EmbeddingStack([], 0, 2, bag_cardinalities=[9], backend="triton").to(device)

    def bag(values, offsets):
        return [Bag(torch.zeros(values, dtype=torch.int64, device=device), torch.tensor(offsets, device=device))]

    nothing = torch.zeros(3, 0, device=device)
    batches = (3, [0, 1, 7]), (5, [0, 6, 2])
    for order in (batches, batches[::-1]):
        told = []
        for given in ([order[0]], [order[1]], order):
            for each in given:
                stack(nothing, nothing.long(), bag(*each))
            with pytest.raises(ValueError, match="offsets") as error:
                stack.raise_faults()
            told.append(str(error.value))
        assert told[2] in told[:2]
