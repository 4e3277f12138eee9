"""python -m fastcross is the fastcross command."""

import sys

from fastcross.cli import main

sys.exit(main())
