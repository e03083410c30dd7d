"""A guarded Keras optimizer clips what Keras applies, at each real update, and is saved with the model."""

import copy
import doctest
import os
import re
from functools import partial

import numpy as np
import pytest
import torch

import gradguard as gg
from forked_python import run_python
from gradguard.errors import InvalidValueError, NonFiniteGradientError

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the extra `keras` is not installed", exc_type=ModuleNotFoundError)

import gradguard.integrations.keras as integration  # noqa: E402 - needs the backend
from gradguard.integrations.keras import GuardedOptimizer, guard, loading  # noqa: E402

# Keras 3.15 converts its variables in a way that NumPy 2 deprecates.
pytestmark = [
    pytest.mark.sampled(1),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
]


def data(batches=4, seed=0):
    generator = np.random.default_rng(seed)
    sizes = np.repeat([1.0, 30.0], 4)[np.arange(8 * batches) % 8][:, None]
    return (sizes * generator.normal(size=(8 * batches, 4))).astype("float32"), np.ones((8 * batches, 1), "float32")


def network(**compile_arguments):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(loss="mse", **compile_arguments)
    return model


def fit(model, batches=4, seed=0, batch_size=8, size=1.0):
    x, y = data(batches, seed)
    model.fit(size * x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model


def weights(model):
    return [v.value.detach().clone() for v in model.trainable_variables]


class Spy(gg.rules.Clipper):
    """Keeps what it is shown, and changes nothing."""

    def __init__(self):
        self.seen = []

    def decide(self, grads, scale=1.0):
        self.seen.append([gradient.clone() for gradient in grads.gradients])
        return gg.ClipByGlobalNorm(float("inf")).decide(grads, scale)


ALL = [
    ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    ("Adam", {}),
    ("AdamW", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("Adadelta", {}),
    ("Adagrad", {}),
    ("Adamax", {}),
    ("Nadam", {}),
    ("Lion", {}),
    ("Ftrl", {}),
    ("Adafactor", {}),
    ("Lamb", {}),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "arguments"), ALL)
def test_it_is_keras_own_clip_where_keras_has_the_rule(name, arguments):
    make = getattr(keras.optimizers, name)
    ours = fit(network(optimizer=guard(make(**arguments), gg.ClipByGlobalNorm(0.05))))
    theirs = fit(network(optimizer=make(**arguments, global_clipnorm=0.05)))
    free = fit(network(optimizer=make(**arguments)))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)
    if name not in ("Adadelta", "Adafactor"):  # hardly moves, or clips by itself
        assert any((a - b).abs().max() > 1e-4 for a, b in zip(weights(ours), weights(free), strict=True))


@pytest.mark.parametrize(
    ("clipper", "argument"), [(gg.ClipByNorm(0.05), {"clipnorm": 0.05}), (gg.ClipByValue(0.01), {"clipvalue": 0.01})]
)
def test_each_tensor_by_itself_and_each_element(clipper, argument):
    ours = fit(network(optimizer=guard(keras.optimizers.SGD(0.1), clipper)))
    theirs = fit(network(optimizer=keras.optimizers.SGD(0.1, **argument)))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-6)


def test_a_guard_that_does_not_bind_changes_no_bit():
    ours = fit(network(optimizer=guard(keras.optimizers.Adam(), gg.ClipByGlobalNorm(1e9))))
    theirs = fit(network(optimizer=keras.optimizers.Adam()))
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=0)
    assert int(ours.optimizer.iterations) == 4
    assert not ours.optimizer.last.clipped


def test_the_result_names_the_variables():
    model = fit(network(optimizer=guard(keras.optimizers.SGD(0.1), gg.ClipByGlobalNorm(0.05))))
    assert model.optimizer.last.names == tuple(v.path for v in model.trainable_variables)
    groups = gg.Groups({"*/bias": gg.ClipByValue(0.0)}, rest=None)
    model = fit(network(optimizer=guard(keras.optimizers.SGD(0.1), groups)))
    assert [bool(w.any()) for w in weights(model)] == [True, False, True, False]


@pytest.mark.parametrize("steps", [None, 2, 4])
def test_it_sees_the_gradients_of_a_whole_window_once(steps):
    spy = Spy()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
    fit(network(optimizer=guard(optimizer, spy)), batches=4, batch_size=8)
    whole = Spy()
    fit(network(optimizer=guard(keras.optimizers.SGD(0.1), whole)), batches=4, batch_size=8 * (steps or 1))
    assert len(spy.seen) == len(whole.seen) == 4 // (steps or 1)
    torch.testing.assert_close(spy.seen, whole.seen, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_thresholds_are_for_gradients_without_the_loss_scale(scale):
    ours, plain = Spy(), Spy()
    fit(network(optimizer=guard(keras.optimizers.SGD(0.1, loss_scale_factor=scale), ours)))
    fit(network(optimizer=guard(keras.optimizers.SGD(0.1), plain)))
    torch.testing.assert_close(ours.seen, plain.seen, rtol=1e-5, atol=1e-6)
    assert guard(keras.optimizers.SGD(0.1, loss_scale_factor=scale), ours).loss_scale_factor == scale


@pytest.mark.parametrize("policy", ["mixed_float16", "by hand"])
def test_keras_loss_scale_goes_round_it(policy):
    spy = Spy()
    optimizer = guard(keras.optimizers.SGD(0.01), spy)
    if policy == "by hand":
        model = network(optimizer=keras.optimizers.LossScaleOptimizer(optimizer))
    else:
        keras.config.set_dtype_policy(policy)
        try:
            model = network(optimizer=optimizer)
        finally:
            keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.optimizer.initial_scale = 2.0**10
    fit(model, batches=2, size=0.01)
    plain = Spy()
    fit(network(optimizer=guard(keras.optimizers.SGD(0.01), plain)), batches=2, size=0.01)
    torch.testing.assert_close(spy.seen, plain.seen, rtol=0.02, atol=0.002)
    x, y = data(1)
    before, scale = weights(model), float(model.optimizer.dynamic_scale.value)
    model.fit(x * np.inf, y, verbose=0)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert float(model.optimizer.dynamic_scale.value) == scale / 2
    assert len(spy.seen) == 2


@pytest.mark.exhaustive  # compiles for half a minute
def test_a_compiled_model_trains_as_one_that_is_not(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # Inductor takes a minute
    make = lambda: guard(keras.optimizers.SGD(0.1), gg.ClipByGlobalNorm(0.05))  # noqa: E731
    compiled, eager = (fit(network(optimizer=make(), jit_compile=jit), batches=2) for jit in (True, False))
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-5, atol=1e-6)
    assert compiled.optimizer.last.clipped
    torch._dynamo.reset()


@pytest.mark.parametrize("steps", [None, 2])
def test_an_update_that_is_not_finite_does_not_happen(steps):
    clipper = gg.AutoClip(percentile=50)
    inner = keras.optimizers.AdamW(weight_decay=0.1, use_ema=True, gradient_accumulation_steps=steps)
    model = fit(network(optimizer=guard(inner, clipper)), batches=4)
    before = weights(model)
    slots = [v.value.detach().clone() for v in inner.variables if v is not inner._iterations]
    remembered = copy.deepcopy(clipper.state_dict())
    x, y = data(steps or 1)
    x[0] = np.nan
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    optimizer = model.optimizer
    assert optimizer.skipped_steps == 1
    assert optimizer.last.culprits()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    if not steps:
        assert int(inner._iterations) == 4
        after = [v.value for v in inner.variables if v is not inner._iterations]
        torch.testing.assert_close(after, slots, rtol=0, atol=0)
    assert remembered.keys() >= {"history"}
    torch.testing.assert_close(clipper.state_dict()["history"], remembered["history"], rtol=0, atol=0)
    fit(model, batches=2)
    assert not any(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert all(bool(w.isfinite().all()) for w in weights(model))


@pytest.mark.parametrize(
    ("policy", "weight"), [("zero", [3.0, 4.0]), ("propagate", [float("nan")] * 2)], ids=["zero", "propagate"]
)
def test_other_policies(policy, weight):
    variable = keras.Variable([3.0, 4.0])
    optimizer = guard(keras.optimizers.SGD(1.0), gg.ClipByGlobalNorm(1.0), nonfinite=policy)
    optimizer.apply([torch.tensor([float("nan"), 1.0])], [variable])
    torch.testing.assert_close(variable.value.detach(), torch.tensor(weight), equal_nan=True)
    assert optimizer.skipped_steps == 0


def test_raising_changes_nothing_and_names_the_variable():
    variable = keras.Variable([3.0, 4.0], name="height")
    optimizer = guard(keras.optimizers.SGD(1.0), gg.ClipByGlobalNorm(1.0), nonfinite="raise")
    with pytest.raises(NonFiniteGradientError, match="height"):
        optimizer.apply([torch.tensor([float("nan"), 1.0])], [variable])
    assert variable.value.tolist() == [3.0, 4.0]
    optimizer.apply([torch.tensor([3.0, 4.0])], [variable])
    assert variable.value.tolist() == pytest.approx([2.4, 3.2])


def test_too_many_skips_in_a_row_are_an_error():
    variable = keras.Variable([1.0], name="weight")
    optimizer = guard(keras.optimizers.SGD(1.0), gg.ClipByGlobalNorm(1.0), max_consecutive_skips=2)
    for gradient in ("nan", "inf", "1", "nan", "nan"):
        optimizer.apply([torch.tensor([float(gradient)])], [variable])
    with pytest.raises(NonFiniteGradientError, match=r"3 updates in a row were skipped.*weight"):
        optimizer.apply([torch.tensor([float("nan")])], [variable])
    assert optimizer.skipped_steps == 5


def test_a_loop_of_ones_own_with_a_variable_without_a_gradient():
    first, second = keras.Variable([3.0, 4.0]), keras.Variable([1.0])
    optimizer = guard(keras.optimizers.SGD(1.0), gg.ClipByGlobalNorm(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply_gradients([(torch.tensor([30.0, 40.0]), first), (None, second)])
    assert first.value.tolist() == pytest.approx([2.4, 3.2])
    assert second.value.tolist() == [1.0]
    assert first.value.grad is None
    optimizer.learning_rate = 0.5
    assert float(optimizer.inner_optimizer.learning_rate) == float(optimizer.learning_rate) == 0.5
    optimizer.apply([], [first, second])


def test_one_tensor_may_be_the_gradient_of_two_variables():
    first, second = keras.Variable([1.0, 1.0]), keras.Variable([1.0, 1.0])
    shared = torch.tensor(2.0).expand(2)  # as autograd returns them
    optimizer = guard(keras.optimizers.SGD(1.0), gg.ClipByGlobalNorm(1.0))
    optimizer.apply([shared, shared], [first, second])
    assert float(optimizer.last.norm) == 4.0
    assert first.value.tolist() == second.value.tolist() == pytest.approx([0.5, 0.5])
    assert shared.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("way", ["weights", "model"])
def test_training_goes_on_bit_for_bit(way, tmp_path):
    make = lambda: guard(keras.optimizers.Adam(), gg.AutoClip(percentile=50))  # noqa: E731
    whole = fit(fit(network(optimizer=make()), seed=1), seed=2)
    half = fit(network(optimizer=make()), seed=1)
    path = tmp_path / ("half.weights.h5" if way == "weights" else "half.keras")
    half.save_weights(path) if way == "weights" else half.save(path)
    if way == "weights":
        again = network(optimizer=make())
        again.optimizer.build(again.trainable_variables)
        again.load_weights(path)
    else:
        with loading(gg.AutoClip(percentile=50)):
            again = keras.saving.load_model(path)
    assert isinstance(again.optimizer, GuardedOptimizer)
    fit(again, seed=2)
    torch.testing.assert_close(weights(again), weights(whole), rtol=0, atol=0)
    forgetful = fit(network(optimizer=make()), seed=1)
    forgetful.optimizer.clipper = gg.AutoClip(percentile=50)
    assert not torch.equal(weights(fit(forgetful, seed=2))[0], weights(whole)[0])


def test_weights_saved_without_a_guard_can_be_loaded(tmp_path):
    plain = fit(network(optimizer=keras.optimizers.Adam()))
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = network(optimizer=guard(keras.optimizers.Adam(), gg.ClipByMedian()))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        model.load_weights(tmp_path / "plain.weights.h5", skip_mismatch=True)
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["skip", "zero"])
def test_a_window_that_is_not_finite_leaves_nothing_to_the_next(policy):
    variable = keras.Variable([3.0])
    inner = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    optimizer = guard(inner, gg.ClipByGlobalNorm(1.0), nonfinite=policy)
    for gradient in ("nan", "1", "0.5", "0.5"):
        optimizer.apply([torch.tensor([float(gradient)])], [variable])
    assert variable.value.tolist() == [2.5]
    assert int(optimizer.iterations) == 2
    assert optimizer.skipped_steps == (policy == "skip")


def test_a_model_with_a_guard_says_how_to_load_it(tmp_path):
    fit(network(optimizer=guard(keras.optimizers.Adam(), gg.ClipByMedian()))).save(tmp_path / "model.keras")
    with pytest.raises((InvalidValueError, TypeError), match=r"loading\(ClipByMedian"):
        keras.saving.load_model(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras", compile=False)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: guard(keras.optimizers.SGD(clipnorm=1.0), gg.ClipByMedian()), ValueError, "SGD has clipnorm=1.0"),
        (lambda: guard(keras.optimizers.SGD(clipvalue=1.0), gg.ClipByMedian()), ValueError, "clipvalue=1.0"),
        (lambda: guard(keras.optimizers.SGD(global_clipnorm=1.0), gg.ClipByMedian()), ValueError, "global_clipnorm=1"),
        (
            lambda: guard(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), gg.ClipByMedian()),
            ValueError,
            "guard the inner one",
        ),
        (
            lambda: guard(guard(keras.optimizers.SGD(), gg.ClipByMedian()), gg.ClipByMedian()),
            ValueError,
            "has a guard already",
        ),
        (lambda: guard(keras.optimizers.SGD(), gg.ClipAdaptive()), ValueError, "rows belong to inputs"),
        (
            lambda: guard(keras.optimizers.SGD(), gg.Chain(gg.ClipByNorm(1.0), gg.ClipAdaptive())),
            ValueError,
            "rows belong to inputs",
        ),
        (
            lambda: guard(keras.optimizers.SGD(), gg.Groups({"*": gg.ClipAdaptive()}, rest=None)),
            ValueError,
            "rows belong to inputs",
        ),
        (lambda: guard(torch.optim.SGD([torch.ones(1)]), gg.ClipByMedian()), TypeError, "use gradguard.Guard"),
        (lambda: guard(keras.optimizers.SGD(), 1.0), TypeError, "clipper is float"),
        (lambda: guard(keras.optimizers.SGD(), gg.ClipByMedian(), nonfinite="stop"), ValueError, "nonfinite='stop'"),
        (
            lambda: guard(keras.optimizers.SGD(), gg.ClipByMedian()).stateless_apply([], [], []),
            TypeError,
            "JAX backend",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_clip_that_is_set_later_is_refused_too():
    optimizer = guard(keras.optimizers.SGD(), gg.ClipByMedian())
    optimizer.inner_optimizer.clipvalue = 0.5
    with pytest.raises(InvalidValueError, match=r"clipvalue=0\.5"):
        optimizer.apply([torch.ones(1)], [keras.Variable([1.0])])


class NotAsKeras(keras.optimizers.SGD):
    """Updates in its own way, so that there is no place to clip."""

    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(gradient)


class NeverClips(keras.optimizers.SGD):
    """Updates at the usual place, but leaves out the clip."""

    def _backend_apply_gradients(self, grads, trainable_variables):
        self._backend_update_step(grads, trainable_variables, self.learning_rate)


@pytest.mark.parametrize("kind", [NotAsKeras, NeverClips])
def test_an_optimizer_that_goes_its_own_way_is_told(kind):
    with pytest.raises(RuntimeError, match="an update that was not clipped"):
        guard(kind(), gg.ClipByMedian()).apply([torch.ones(1)], [keras.Variable([1.0])])


@pytest.mark.parametrize(
    ("backend", "words"), [("numpy", "Keras runs on numpy"), ("nonsense", "does not start.*nonsense.*KERAS_BACKEND")]
)
def test_other_backends_are_refused_at_import(backend, words, tmp_path):
    code = "import gradguard.integrations.keras"
    if backend == "numpy":  # Keras itself wants JAX for that
        code = "import sys; from types import SimpleNamespace as N; sys.modules['keras'] = " + (
            f"N(backend=N(backend=lambda: 'numpy')); {code}"
        )
    done = run_python("-c", code, cwd=tmp_path, env={"KERAS_BACKEND": backend}, check=False)
    assert done.returncode == 1
    assert re.search(words, done.stderr)


def test_the_examples_run():
    """Pytest passes over them where Keras is set to another backend."""
    done = doctest.testmod(integration, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert (done.failed, done.attempted > 10) == (0, True)
