"""Each of the other packages' cross networks in turn."""

import pytest
from peer_modules import BUILDERS


@pytest.fixture(params=BUILDERS, ids=lambda build: build.__name__)
def build(request):
    return request.param
