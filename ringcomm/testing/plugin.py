"""A fixture of several ranks for pytest.

    # conftest.py
    pytest_plugins = ["ringcomm.testing.plugin"]

    # test_total.py
    import pytest, torch, torch.distributed as dist

    def total(rank, factor):
        x = torch.tensor([factor * rank])
        dist.all_reduce(x)
        return x.item()

    @pytest.mark.ranks(2, 3)  # a test with each; without the mark with 2 ranks
    def test_total(ranks):
        assert ranks(total, 5.0) == [5.0 * sum(range(ranks.world_size))] * ranks.world_size

`ranks` takes what run_ranks() takes after the number of ranks.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ringcomm.testing import run_ranks


class Ranks:
    """The fixture: a call runs a function on `world_size` ranks, as run_ranks() does."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """The function's results by rank; `options` are those of run_ranks()."""
        return run_ranks(self.world_size, function, *arguments, **options)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    about = "ranks(*sizes): run the test with each of these numbers of ranks"
    config.addinivalue_line("markers", about)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each number of ranks of its mark."""
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks")
        sizes = mark.args if mark is not None else (2,)
        metafunc.parametrize("ranks", sizes, indirect=True, ids=lambda size: f"{size} ranks")


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Runs functions on several ranks."""
    return Ranks(request.param)
