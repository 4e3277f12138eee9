"""Batches that are read ahead: the same ones, by a thread that ends when nobody wants them any more."""

import itertools
import os
import signal
import threading
import time
import traceback

import pytest
import torch

from fastcross.batch import Bag, Batch
from fastcross.training.config import TrainingConfig
from fastcross.training.loop import Interrupted, Trainer
from fastcross.training.run_folder import Run
from fastcross.training.step import THREAD_NAME, TrainingError, read_ahead, read_directly
from tests.training.helpers import assert_same_weights, small_dcn, weights

CPU = torch.device("cpu")
LIMIT = 120  # seconds that a test waits for what must happen


def small_batch(i):
    bag = Bag(torch.tensor([i, i + 1]), torch.zeros(1, dtype=torch.int64), torch.ones(2))
    return Batch(torch.full((1, 2), float(i)), torch.tensor([[i]]), (bag,), torch.ones(1))


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not readers()
    yield
    assert not readers()


def test_the_same_batches_in_the_same_order():
    found = list(read_ahead(map(small_batch, range(7)), CPU))
    expected = list(read_directly(map(small_batch, range(7)), CPU))
    assert len(found) == len(expected) == 7
    for a, b in zip(found, expected, strict=True):
        assert len(a.tensors) == len(b.tensors) == 6
        assert all(map(torch.equal, a.tensors, b.tensors))


@pytest.mark.parametrize("steps", [7, 60])
def test_training_is_bit_for_bit_the_same(cache, steps):
    """60 steps are more than two epochs of 26: the thread reads on from one into the next."""
    found = []
    for ahead in (True, False):
        model = small_dcn(cache, dropout=0.5)
        torch.manual_seed(1)
        trainer = Trainer(model, cache, TrainingConfig(batch_size=128, max_steps=steps), read_ahead=ahead)
        assert trainer.fit()["steps"] == steps
        found.append(weights(model))
    assert_same_weights(*found)


def test_one_batch_is_read_while_the_caller_works_and_no_more():
    read = [threading.Event() for _ in range(4)]

    def reading():
        for i, event in enumerate(read):
            event.set()
            yield small_batch(i)

    batches = read_ahead(reading(), CPU)
    next(batches)
    assert read[1].wait(LIMIT)
    time.sleep(0.05)
    assert not read[2].is_set()
    next(batches)
    assert read[2].wait(LIMIT)
    batches.close()


def test_what_the_reading_raises_is_raised_with_its_traceback():
    def break_off():
        raise OSError("the disk is gone")

    def reading():
        yield small_batch(0)
        break_off()

    batches = read_ahead(reading(), CPU)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(batches)
    assert "break_off" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_generator_that_is_dropped_takes_its_thread_along():
    batches = read_ahead(map(small_batch, itertools.count()), CPU)
    next(batches)
    assert len(readers()) == 1
    del batches
    assert not readers()


def test_one_that_never_began_has_none():
    read_ahead(map(small_batch, itertools.count()), CPU).close()


def test_a_training_that_fails_leaves_no_thread(cache):
    model = small_dcn(cache)
    with torch.no_grad():
        model.cross.weight[1, 3] = torch.inf
    with pytest.raises(TrainingError, match="step 1 "):
        Trainer(model, cache, TrainingConfig(batch_size=128)).fit()
    assert not readers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_training_that_is_interrupted_leaves_no_thread(number, cache, tmp_path):
    run = Run.create(tmp_path / "run", {})
    config, stop = TrainingConfig(batch_size=128), lambda row: signal.raise_signal(number)
    trainer = Trainer(small_dcn(cache), cache, config, run, on_evaluation=stop)
    with pytest.raises(Interrupted, match="step 26 of 260"):
        trainer.fit()
    assert not readers()


def test_a_key_that_is_pressed_while_a_batch_is_awaited_ends_the_wait():
    begun, released = threading.Event(), threading.Event()

    def reading():
        begun.set()
        released.wait(LIMIT)
        yield small_batch(0)

    def press():
        begun.wait(LIMIT)
        signal.raise_signal(signal.SIGINT) if os.name == "nt" else os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # the generator waits for what its thread is reading
        released.set()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser = threading.Thread(target=press)
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            next(read_ahead(reading(), CPU))
    finally:
        presser.join()
        signal.signal(signal.SIGINT, previous)
    for reader in readers():  # of a key that came before the executor had noted its thread: it ends, and is not awaited
        reader.join(LIMIT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_drops_it_without_a_hang_and_cannot_go_on():
    batches = read_ahead(map(small_batch, itertools.count()), CPU)
    next(batches)
    child = os.fork()
    if child == 0:
        try:
            next(batches)
        except RuntimeError as error:
            os._exit(0 if "a thread of process" in str(error) else 1)
        os._exit(2)
    deadline = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert next(batches).categorical.item() == 1
    batches.close()
