"""The processes of the distributed tests: `pool(2).run(function, *args)` calls it in each; see pool.py."""

from zlib import crc32

import pytest
from pool import Pools


def pytest_collection_modifyitems(items):
    """Mark two thirds of each long table as exhaustive: `make test` runs the same third every time."""
    for item in items:
        in_table = item.path.parent.name == "distributed" and hasattr(item, "callspec")
        if in_table and item.path.name in TABLES and crc32(item.name.encode()) % 3:
            item.add_marker(pytest.mark.exhaustive)


TABLES = {
    "test_adaptive_on_shards.py",
    "test_collectives.py",
    "test_guard_on_shards.py",
    "test_norm_on_shards.py",
    "test_rules_on_shards.py",
}


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    pools = Pools(tmp_path_factory.mktemp("pools"))
    yield pools
    pools.close()
