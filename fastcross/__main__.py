"""python -m fastcross is the fastcross command."""

import os
import sys

from fastcross.cli.main import main
from fastcross.distributed import under_torchrun

code = main()
if under_torchrun():
    # Threads of libraries may still run, and C++ calls terminate() if it finds one at exit: torchrun would count that
    # as # a failure of the whole run. All files are written by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
