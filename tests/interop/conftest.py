"""Each of the other packages' cross networks in turn."""

import pytest
from peer_modules import BUILDERS, RANK_ONE


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def build(request):
    return request.param


@pytest.fixture(params=RANK_ONE, ids=lambda build: build.__name__)
def build_rank_one(request):
    return request.param
