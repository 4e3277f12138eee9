"""Each of the other packages' cross networks in turn."""

import pytest
from peer_modules import BUILDERS, RANK_ONE

from fastcross.ops import multiplicative


@pytest.fixture(autouse=True)
def no_size_is_small(monkeypatch):
    """Few rows take the operators, too, and not the packages' own code."""
    monkeypatch.setattr(multiplicative, "SMALL", 0)


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def build(request):
    return request.param


@pytest.fixture(params=RANK_ONE, ids=lambda build: build.__name__)
def build_rank_one(request):
    return request.param
