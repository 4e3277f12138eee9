"""Chunks are taken once each, a thread's own first."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastcross.kernels.cpu import cross_network, threads
from fastcross.kernels.cpu.compile import compiled
from fastcross.kernels.cpu.fields import CLAIMS, WORD_OF_ASKING, WORD_OF_SHARE, whole
from fastcross.kernels.cpu.layout import Layout
from fastcross.kernels.cpu.native.unpack import take
from fastcross.kernels.cpu.plan import chunks

RECORD = Layout(
    "record",
    items="M",
    work=lambda n: 1,
    operands={"turns": whole("M", kind="index"), "times": whole("M", kind="index")},
)
take_record = take(RECORD)


def record(block):
    """Writes in which turn of its thread a chunk was taken, and counts how often."""
    task, turn = take_record(block), 0
    while task.chunk < task.chunks:
        turn += 1
        task.turns[task.chunk] = turn
        task.times[task.chunk] += 1
        task = take_record(block)


def one_by_one(number, share, thread):
    """A task of so many chunks of one item each, its turns and its times."""
    turns, times = torch.zeros(2, number, dtype=torch.int64)
    task = RECORD.task(torch.float32, turns=turns, times=times)
    task.block[1], task.block[2] = number, 1
    task.block[WORD_OF_SHARE], task.block[WORD_OF_ASKING] = share, thread
    return task, turns, times


@pytest.mark.parametrize(
    ("thread", "order"),
    [(0, range(8)), (1, [2, 3, 4, 5, 6, 7, 0, 1]), (3, [6, 7, 0, 1, 2, 3, 4, 5]), (4, range(8)), (99, range(8))],
)
def test_a_thread_begins_with_its_own_chunks(thread, order):
    ask = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: thread)
    task, turns, times = one_by_one(8, 2, ctypes.cast(ask, ctypes.c_void_p).value)
    compiled(record, torch.float32)(task.block)
    assert turns.argsort().tolist() == list(order)
    assert times.tolist() == [1] * 8


def test_without_a_number_a_thread_begins_with_the_first():
    task, turns, _ = one_by_one(8, 2, 0)
    compiled(record, torch.float32)(task.block)
    assert turns.tolist() == list(range(1, 9))


@pytest.mark.parametrize("number", [1, 2, CLAIMS - 1, CLAIMS, CLAIMS + 1, 5000])
def test_every_chunk_is_taken_once(number):
    """By threads that begin at the same place, and by such that begin at places of their own."""
    kernel = compiled(record, torch.float32)
    with ThreadPoolExecutor(8) as pool:
        for share, thread in ((1, 0), (-(-number // 2), threads.thread_number())):
            for _ in range(50):
                task, _, times = one_by_one(number, share, thread)
                list(pool.map(kernel, [task.block] * 8))
                assert (times == 1).all()
                task.block[0] = 0
                threads.run(kernel, task.block, 2)
                assert (times == 2).all()


def test_openmp_tells_a_thread_its_number():
    assert threads.thread_number() != 0
    assert ctypes.CFUNCTYPE(ctypes.c_int)(threads.thread_number())() == 0


def test_many_threads_have_as_many_chunks_as_there_are_bits_for():
    large = 1 << 20
    assert chunks(large, 1024, 4, 4)[:2] == (4, 16)
    assert chunks(large, 1024, 24, 4)[:2] == (24, 48)
    assert chunks(large, 1024, 64, 4)[:2] == (64, 64)
    assert chunks(large, 1024, 96, 4)[:2] == (96, 96)  # more than bits: these are counted


def test_small_chunks_are_for_tasks_that_have_no_sums_of_their_own():
    given = {"x0": torch.ones(512, 390), "w": torch.ones(3, 390), "b": None, "v": None}
    needs = {"need_dx0": 1, "need_dw": 1, "need_db": 1, "need_dv": 0}
    forward = cross_network.FORWARD.task(None, **given, keep_p=1)
    backward = cross_network.BACKWARD.task(None, **given, **needs, dout=torch.ones(512, 390), p=None)
    assert (forward.block[1], backward.block[1]) == (8, 2)
