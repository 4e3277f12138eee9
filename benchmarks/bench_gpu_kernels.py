"""The GPU kernels' machine code, where no GPU is there to run them: compiled offline for every target."""

import pytest

from benchmarks import clock
from benchmarks.static import gpu_static


@pytest.mark.skipif(clock.device().type == "cuda", reason="a GPU is here: the other groups measured its kernels")
def bench_gpu_kernels(benchmark, group, request):
    dtypes = gpu_static.DTYPES if request.config.getoption("full") else ("fp32",)
    rows = benchmark.pedantic(gpu_static.inspect, kwargs={"dtypes": dtypes})
    group["cases"].append({"rows": rows, "note": gpu_static.ESTIMATE})
    assert not [row for row in rows if row["wrong"]]
