"""python -m fastcross is the fastcross command."""

import sys

from fastcross.cli.main import main

sys.exit(main())
