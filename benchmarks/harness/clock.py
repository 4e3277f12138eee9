"""How long a call takes: on the host's clock, or on the device's own, its L2 cache flushed before each call."""

import time
from collections.abc import Callable

import torch

Step = Callable[[], object]


def device() -> torch.device:
    """The GPU (NVIDIA or AMD: PyTorch calls both "cuda") where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class HostClock:
    """Seconds until the results are there: what a caller waits, on any device."""

    shortest = 2e-4  # seconds per sample, below which calls are timed several at a time

    def __init__(self, synchronize: bool = False) -> None:
        self.wait: Step = torch.cuda.synchronize if synchronize else lambda: None

    def __call__(self, step: Step, calls: int = 1) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        self.wait()
        return (time.perf_counter() - start) / calls


class DeviceClock:
    """Seconds between two events on the device, with nothing of the operands left in its L2 cache."""

    shortest = 0.0

    def __init__(self) -> None:
        self.flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")  # larger than any L2

    def __call__(self, step: Step, calls: int = 1) -> float:
        total = 0.0
        for _ in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.flush.zero_()  # also keeps the device busy while the host prepares the launch
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            total += start.elapsed_time(end) / 1e3
        return total / calls


def clock(latency: bool = False) -> HostClock | DeviceClock:
    """Latency is what a caller waits; throughput on a GPU is what its own events say."""
    on_gpu = device().type == "cuda"
    return DeviceClock() if on_gpu and not latency else HostClock(synchronize=on_gpu)


def captured(step: Step) -> Step:
    """The step as a CUDA graph: its launches are recorded once and replayed without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capture wants everything compiled and allocated beforehand
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay() -> object:
        graph.replay()
        return outputs

    return replay
