"""The processes of the distributed tests: `pool(2).run(function, *args)` calls it in each; see pool.py."""

import pytest
from pool import Pools


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
