"""What tests of several trainers share: processes, and no accelerator left over from the test before."""

import pytest
from accelerators import forget_accelerators

from distributed.pool import Pools


@pytest.fixture(autouse=True)
def _no_accelerator_left():
    forget_accelerators()  # of examples
    yield
    forget_accelerators()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    pools = Pools(tmp_path_factory.mktemp("processes"))
    yield pools
    pools.close()
