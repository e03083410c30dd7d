"""The pytest fixture and mark `gradcheck`; pytest loads this by itself, nothing else does.

@pytest.mark.gradcheck(dtypes=[torch.float32, torch.bfloat16], sizes={7: 16})
def test_my_kernel(gradcheck):
    gradcheck(my_kernel, torch.randn(7, 64))
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

_MARK = (
    "gradcheck(dtypes=None, **options): run the test once for each of dtypes, to which the fixture gradcheck converts "
    "inputs and modules; the rest are options of gradguard.gradcheck, such as sizes={7: 16}"
)


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the mark."""
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each dtype of the mark."""
    mark = metafunc.definition.get_closest_marker("gradcheck")
    if mark is None or "gradcheck" not in metafunc.fixturenames:
        return
    if dtypes := mark.kwargs.get("dtypes"):
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        metafunc.parametrize("gradcheck", dtypes, indirect=True, ids=names)


@pytest.fixture
def gradcheck(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return `gradguard.gradcheck` with the options of the mark; the test fails with the report unless it is a PASS."""
    mark = request.node.get_closest_marker("gradcheck")
    own = {} if mark is None else {key: value for key, value in mark.kwargs.items() if key != "dtypes"}
    dtype = getattr(request, "param", None)

    def check(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from gradguard import gradcheck as run

        if dtype is not None:
            fn, inputs, options = _converted(fn, inputs, options, dtype)
        report = run(fn, *inputs, **{**own, **options})
        if report.verdict != "PASS":
            pytest.fail(str(report), pytrace=False)
        return report

    return check


def _converted(
    fn: Any, inputs: tuple[Any, ...], options: dict[str, Any], dtype: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from torch import Tensor, nn

    from gradguard.torch_private import tree_map

    def convert(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    kwargs = {"kwargs": tree_map(convert, dict(options["kwargs"]))} if options.get("kwargs") else {}
    fn = copy.deepcopy(fn).to(dtype) if isinstance(fn, nn.Module) else fn
    return fn, tuple(tree_map(convert, inputs)), {**options, **kwargs}
