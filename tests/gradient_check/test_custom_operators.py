"""Operators of `torch.library` are checked by `torch.library.opcheck` as well."""

import pytest
import torch

import gradguard as gg

pytestmark = pytest.mark.slow
X = torch.linspace(0.1, 1, 5, dtype=torch.float64)


def operator(name, returns=torch.sin, fake=torch.empty_like):
    made = torch.library.custom_op(f"gradguard_tests::{name}", returns, mutates_args=(), schema="(Tensor x) -> Tensor")

    def keep(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    made.register_autograd(lambda ctx, v: v * ctx.saved_tensors[0].cos(), setup_context=keep)
    if fake is not None:
        made.register_fake(fake)
    return made


def test_a_right_one():
    made = operator("right")
    for fn in (made, torch.ops.gradguard_tests.right, torch.ops.gradguard_tests.right.default):
        report = gg.gradcheck(fn, X)
        assert (report.verdict, report.notes) == ("PASS", ())


def test_a_fake_of_another_shape():
    report = gg.gradcheck(operator("shapes", fake=lambda x: x.new_empty(3)), X)
    assert report.verdict == "FAIL"
    assert {one.kind for one in report.findings} == {"operator"}
    assert "torch.library.opcheck, test_faketensor" in str(report)


def test_without_a_fake():
    report = gg.gradcheck(operator("fakeless", fake=None), X)
    assert report.verdict == "PASS"
    assert [(one.kind, "no fake implementation" in one.message) for one in report.notes] == [("operator", True)]


def test_a_wrong_gradient_comes_first():
    (found,) = {one.kind for one in gg.gradcheck(operator("wrong", returns=torch.cos), X).findings}
    assert found == "mismatch"
