"""Every suite of the registry; and the GPU kernels' machine code, where no GPU is there to run them."""

import pytest

from benchmarks.harness import clock
from benchmarks.static import gpu_static


def bench_suite(suite, case, contestant, competition, play):
    play(competition.record(suite, case), contestant)


@pytest.mark.skipif(clock.device().type == "cuda", reason="a GPU is here: the suites measured its kernels")
def bench_gpu_kernels(benchmark, competition, request):
    dtypes = gpu_static.DTYPES if request.config.getoption("full") else ("fp32",)
    rows = benchmark.pedantic(gpu_static.inspect, kwargs={"dtypes": dtypes})
    competition.add(gpu_static.SUITE, {"rows": rows})
    assert not [row for row in rows if row["wrong"]]
