"""python -m fastcross is the fastcross command."""

import os
import sys

from fastcross.cli.main import main
from fastcross.distributed import under_torchrun

code = main()
if under_torchrun():
    # Libraries' own threads may outlive the work, and C++ calls terminate() where it finds one on the way out: torchrun
    # would take that for a failure of the whole run. Everything is written by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
