"""Epsilon agrees with published triples, and a calibrated noise multiplier never spends more than was asked for."""

import math
import sys

import pytest

from forked_python import run_python
from gradguard.errors import InvalidTypeError, InvalidValueError, MissingPackageError
from gradguard.private import Accountant, epsilon, noise_multiplier_for
from gradguard.private.accounting import _search

Q = 256 / 60000
TRIPLES = [  # noise multiplier, sampling rate, steps, RDP (improved conversion), PLD; delta 1e-5
    (4.0, 0.01, 10_000, 1.0355, 0.9470),
    (1.1, Q, 14_062, 2.5966, 2.3817),
    (1.3, Q, 3_515, 0.9544, 0.8645),
    (0.7, Q, 10_546, 6.3195, 5.6394),
    (0.7, Q, 16_406, 7.8393, None),
    (1.5, 0.04, 2_250, 7.3293, 6.7688),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("triple", TRIPLES, ids=str)
def test_rdp_gives_the_published_epsilons(triple):
    assert round(epsilon(*triple[:3], delta=1e-5, accountant="rdp"), 4) == triple[3]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("triple", [t for t in TRIPLES if t[4]], ids=str)
def test_pld_gives_the_published_epsilons(triple):
    assert round(epsilon(*triple[:3], delta=1e-5, accountant="pld"), 4) == triple[4]


def test_pld_is_the_default_and_the_tighter_one():
    assert (
        epsilon(4.0, 0.01, 1000, 1e-5) == epsilon(4.0, 0.01, 1000, 1e-5, "pld") < epsilon(4.0, 0.01, 1000, 1e-5, "rdp")
    )


def test_opacus_and_dp_accounting_agree():
    from opacus.accountants.analysis import rdp

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
    spent = rdp.compute_rdp(q=0.01, noise_multiplier=1.0, steps=1000, orders=orders)
    theirs, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=1e-5)
    assert epsilon(1.0, 0.01, 1000, 1e-5, "rdp") == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_it_is_monotone(accountant):
    few = lambda **changes: epsilon(  # noqa: E731
        **{"noise_multiplier": 3.0, "sample_rate": 0.02, "steps": 50, "delta": 1e-5, **changes}, accountant=accountant
    )
    assert few(noise_multiplier=2.0) > few() > few(noise_multiplier=4.0)
    assert few(sample_rate=0.04) > few() > few(sample_rate=0.01)
    assert few(steps=100) > few() > few(steps=25)
    assert few(delta=1e-6) > few() > few(delta=1e-4)


@pytest.mark.filterwarnings("ignore:epsilon .* is the bound by R")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_without_noise_it_is_infinite_and_before_that_it_grows(accountant):
    values = [epsilon(z, 0.01, 100, 1e-5, accountant) for z in (0.5, 0.1, 0.01, 0.0)]
    assert values == sorted(values)
    assert values[2] > 1e4
    assert values[3] == math.inf


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_no_steps_and_no_samples_cost_nothing(accountant):
    assert epsilon(0.0, 0.1, 0, 1e-5, accountant) == epsilon(0.0, 0.0, 10, 1e-5, accountant) == 0.0


TARGETS = [(3.0, 1e-5, Q, 2000), (0.1, 1e-6, 0.01, 1000), (1.0, 1e-5, 1.0, 20), (50.0, 1e-5, 0.05, 100)]


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_large_epsilon_is_said_to_be_a_loose_bound(accountant):
    words = r"epsilon 12\d\.\d is the bound by Rényi divergences.* may be half of it"
    with pytest.warns(UserWarning, match=words) as told:
        epsilon(0.5, 0.1, 500, 1e-5, accountant)
    assert told[0].filename == __file__
    ledger = Accountant(accountant)
    ledger.step(0.5, 0.1, 500)
    with pytest.warns(UserWarning, match="accountant='pld', which is not" if accountant == "pld" else "may be half"):
        ledger.epsilon(1e-5)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:epsilon .* is the bound by R")
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_calibration_comes_close_and_never_overshoots(target):
    found = noise_multiplier_for(*target, accountant="rdp")
    spent = epsilon(found, *target[2:], target[1], "rdp")
    assert 0.999 * target[0] <= spent <= target[0]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("target", [*TARGETS[:3], (0.004, 1e-5, 0.001, 10)], ids=str)
def test_calibration_by_pld_does_so_too_with_less_noise(target):
    found = noise_multiplier_for(*target)
    assert 0.999 * target[0] <= epsilon(found, *target[2:], target[1]) <= target[0]
    assert found <= noise_multiplier_for(*target, accountant="rdp")


CURVES = {
    "straight": lambda z: 9 / z,
    "steep": lambda z: 9 / z**8,
    "bent": lambda z: 1 / z + 40 * math.exp(-3 * z),
    "jump": lambda z: 4 / z if z > 1.3 else 60 / z,
    "infinite at first": lambda z: math.inf if z < 2 else 9 / z**2,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("start", [0.1, 1.0, 30.0])
def test_the_search_stays_on_the_safe_side_of_any_falling_curve(curve, start):
    asked = []
    spent = lambda z: (asked.append(z), CURVES[curve](z))[1]  # noqa: E731
    for target in [0.05 * 1.07**k for k in range(60)]:
        asked.clear()
        found = _search(target, spent, start)
        assert CURVES[curve](found) <= target
        assert CURVES[curve](found * 0.998) > 0.99 * target
        assert len(asked) < 40


def test_an_infinite_target_needs_no_noise():
    assert noise_multiplier_for(math.inf, 1e-5, 0.1, 10) == 0.0


def test_an_unreachable_target_says_so():
    with pytest.raises(InvalidValueError, match=r"no noise multiplier up to 1e\+06 is enough .* accountant='pld'"):
        noise_multiplier_for(1e-4, 1e-10, 0.9, 1000, "rdp")


def test_an_accountant_counts_equal_steps_together():
    accountant = Accountant("rdp")
    for _ in range(5):
        accountant.step(1.0, 0.01)
    accountant.step(2.0, 0.01, 3)
    accountant.step(1.0, 0.01)
    assert accountant.history == [(1.0, 0.01, 5), (2.0, 0.01, 3), (1.0, 0.01, 1)]
    assert accountant.steps == 9
    other = Accountant("rdp")
    other.step(2.0, 0.01, 3)
    other.step(1.0, 0.01, 6)
    assert accountant.epsilon(1e-5) == other.epsilon(1e-5)


def test_different_steps_are_composed():
    accountant = Accountant("rdp")
    accountant.step(1.0, 0.01, 100)
    alone = accountant.epsilon(1e-5)
    accountant.step(2.0, 0.02, 100)
    assert accountant.epsilon(1e-5) > max(alone, epsilon(2.0, 0.02, 100, 1e-5, "rdp"))
    accountant.step(0.0, 0.02)
    assert accountant.epsilon(1e-5) == math.inf


def test_a_saved_accountant_goes_on():
    accountant, other = Accountant("rdp"), Accountant("rdp")
    accountant.step(1.0, 0.01, 5)
    other.step(7.0, 0.5)
    other.load_state_dict(accountant.state_dict())
    accountant.step(1.0, 0.01)
    other.step(1.0, 0.01)
    assert accountant.history == other.history == [(1.0, 0.01, 6)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Accountant("gdp"), InvalidValueError, "reports less than is spent: 1.32 .* where 2.00 is right"),
        (lambda: Accountant("prv"), InvalidValueError, "use 'pld', whose results are the same to three digits"),
        (lambda: Accountant("moments"), InvalidValueError, "expected 'pld' .* or 'rdp'"),
        (lambda: Accountant().load_state_dict({}), InvalidValueError, "expected the state of an accountant"),
        (lambda: epsilon(-1.0, 0.1, 1, 0.1), InvalidValueError, "noise_multiplier=-1.0: expected a finite number"),
        (lambda: epsilon(1.0, 1.1, 1, 0.1), InvalidValueError, "sample_rate=1.1: expected a number from 0 to 1"),
        (lambda: epsilon(1.0, 0.1, -1, 0.1), InvalidValueError, "steps=-1: expected a whole number >= 0"),
        (lambda: epsilon(1.0, 0.1, 1.0, 0.1), InvalidTypeError, "steps=1.0: expected a whole number >= 0, got float"),
        (lambda: epsilon(1.0, 0.1, 1, 0.0), InvalidValueError, "delta=0.0: expected a probability above 0 and below 1"),
        (lambda: noise_multiplier_for(0.0, 0.1, 0.1, 1), InvalidValueError, "target_epsilon=0.0: expected a number"),
        (lambda: noise_multiplier_for(1.0, 0.1, 0.1, 0), InvalidValueError, "steps=0: expected a whole number >= 1"),
    ],
)
def test_wrong_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_without_dp_accounting_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(MissingPackageError, match=r"pip install gradguard\[private\]"):
        Accountant()


def test_importing_private_training_does_not_import_the_accounting(tmp_path):
    code = "import sys, gradguard.private; print(sorted({'dp_accounting', 'scipy', 'sklearn'} & set(sys.modules)))"
    done = run_python("-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "[]"
