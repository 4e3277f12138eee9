"""What pyproject.toml cannot say: how the CPU kernels are built, and that a build starts from nothing.

Every file of kernels is compiled once per instruction set; the library chooses one when it is loaded. It stands on
PyTorch's stable ABI and has no Python in it, so one library serves every Python and every PyTorch from 2.10 on.
Without a compiler the package installs without it, and says so.
"""

import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

CPU = Path("kernels") / "cpu"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-g0",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    *os.environ.get("CXXFLAGS", "").split(),
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {"avx2": AVX2, "avx512": AVX512}
LEAST_TORCH = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10


class BuildKernels(build_ext):
    def build_extension(self, extension):
        """One library: the bindings, and the kernels once per instruction set."""
        torch = Path(find_spec("torch").submodule_search_locations[0])
        bindings = [str(file) for file in sorted(CPU.glob("bindings_*.cpp"))]
        kernels = [str(file) for file in sorted(CPU.glob("*.cpp")) if str(file) not in bindings]
        jobs = [(file, self.build_temp, [f"-I{torch / 'include'}", LEAST_TORCH]) for file in bindings]
        for name, flags in INSTRUCTION_SETS.items():
            folder = str(Path(self.build_temp) / name)
            jobs += [(file, folder, [f"-DFASTCROSS_ISA={name}", *flags]) for file in kernels]

        def compile(job):
            file, folder, flags = job
            return self.compiler.compile([file], output_dir=folder, extra_postargs=[*FLAGS, *flags])

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [one for made in pool.map(compile, jobs) for one in made]
        path = self.get_ext_fullpath(extension.name)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # By its name alone: whoever loads this library has loaded PyTorch's.
        options = {"library_dirs": [str(torch / "lib")], "libraries": ["torch_cpu"], "target_lang": "c++"}
        self.compiler.link_shared_object(objects, path, **options)

    def run(self):
        missing = [name for name, found in (("g++", shutil.which("g++") or shutil.which("c++")),) if not found]
        missing += [name for name in ("torch",) if find_spec(name) is None]
        if missing:
            print(
                f"fastcross: built without its CPU kernels, for there is no {' and no '.join(missing)}", file=sys.stderr
            )
            return
        super().run()


class BuildFromNothing(build_py):
    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)  # or modules deleted since the last build come back
        super().run()


setup(
    cmdclass={"build_py": BuildFromNothing, "build_ext": BuildKernels},
    ext_modules=[Extension("fastcross.kernels.cpu.library", sources=[], py_limited_api=True)],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
