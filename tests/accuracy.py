"""The rule is in fastcross/accuracy.py."""

from fastcross.accuracy import *  # noqa: F403
