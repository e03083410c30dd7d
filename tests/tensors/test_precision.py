"""Where float32 may be computed in TF32, as PyTorch's switches say."""

from pathlib import Path

import pytest
import torch

from forked_python import run_python
from gradguard.tensors.matmul_precision import is_tf32_allowed

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _switches():
    backends = torch.backends
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [kind.fp32_precision for kind in kinds], backends.fp32_precision
    yield
    backends.fp32_precision = before[1]
    for kind, precision in zip(kinds, before[0], strict=True):
        kind.fp32_precision = precision


def test_by_default_convolutions_and_recurrent_layers_may_and_products_not():
    assert is_tf32_allowed(GPU, "convolution")
    assert is_tf32_allowed(GPU, "recurrent")
    assert not is_tf32_allowed(GPU, "product")
    assert is_tf32_allowed(GPU, "product", "convolution")
    assert not is_tf32_allowed(torch.device("cpu"), "convolution")
    assert not is_tf32_allowed(GPU)


def test_each_switch_counts_for_its_kind():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert is_tf32_allowed(GPU, "product")
    assert not is_tf32_allowed(GPU, "convolution")
    assert is_tf32_allowed(GPU, "recurrent")


def test_where_a_kind_says_nothing_the_switch_above_counts():
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    assert is_tf32_allowed(GPU, "product")
    torch.backends.fp32_precision = "ieee"
    assert not is_tf32_allowed(GPU, "product")


@pytest.mark.parametrize("count", [3, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_after_a_block_in_float32_each_switch_says_and_follows_what_it_did(count, tmp_path):
    done = run_python(Path(__file__).with_name("float32_switches.py"), str(count), cwd=tmp_path)
    assert done.stdout == f"{min(15 + count, 197)} programs\n"
