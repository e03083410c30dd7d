"""The probe against engines that are sums: healthy ones pass, each mistake is found, named, and its factor told."""

import itertools
import math

import pytest
import torch
from engines import changed, each_copy, first_part_only, local, mean_of_ranks, model_of, once, own_experts, summed

from gradguard.audit.factors import Setting
from gradguard.audit.held import HeldPiece, tensors_of, true_norm
from gradguard.audit.pieces import summary_of
from gradguard.audit.probe import Probe, classes_of, elements_value, finding_of


def probed(model, engine, setting=None):
    tensors = tensors_of(model.processes)
    place = {(r, h.index): i for i, t in enumerate(tensors) for p in t.parts for r, h in p.holders}

    questions = []

    def ask(places, rank, again):
        questions.append(places)

        def square(r, held):
            i = place[r, held.index]
            filled = i in places and rank in (None, r)
            return held.numel * elements_value(i, tensors[i].numel, again) ** 2 if filled else 0.0

        return model.norms(engine, square)

    probe = Probe(tensors, ask, setting or Setting(model.world), 1e-4)
    counted = probe.counts(classes_of(tensors))
    return tensors, [finding_of(one, tensors) for one in counted if one.kind], questions


SHAPES = [(1, 2), (2, 1), (1, 4), (2, 2), (3, 2), (2, 4)]


@pytest.mark.parametrize("attributes", ["none", "right", "wrong"])
def test_healthy_engines_pass_and_the_truth_is_told(attributes):
    for seed in range(60):
        dp, tp = SHAPES[seed % len(SHAPES)]
        model = model_of(seed, dp, tp, attributes=attributes, fresh=seed % 2 == 0 and attributes != "wrong")
        tensors, findings, _ = probed(model, summed(once))
        assert true_norm(tensors) == pytest.approx(model.true, rel=1e-9), seed
        assert not any(t.unknown or p.differ for t in tensors for p in t.parts), seed
        assert findings == [], seed


BUGS = {
    "1: a replicated weight once a rank": (each_copy("replicated"), "replicated", "factor", 8.0),
    "2: experts on the first rank only": (first_part_only("expert"), "expert", "ranks", 1 / 4),
    "2: shards on the first rank only": (first_part_only("sharded"), "sharded", "ranks", 1 / 4),
    "3: the mean of the ranks' norms": (mean_of_ranks, "sharded", "mean", 1 / 4),
    "4: each rank its own experts": (own_experts, "expert", "local", None),
    "5: tied, on each stage": (changed("tied", 2.0), "tied", "factor", 2.0),
    "6: experts times their parts": (changed("expert", 16.0), "expert", "factor", 16.0),
    "experts are forgotten": (changed("expert", 0.0), "expert", "factor", 0.0),
    "7: divided by the accumulation twice": (changed("expert", 1 / 25), "expert", "factor", 1 / 25),
    "15: the loss scale": (changed("stage", 2.0**32), "stage", "factor", 2.0**32),
    "19: its own part": (local, "expert", "local", None),
    "no known factor": (changed("sharded", 1.37), "sharded", "factor", 1.37),
    "a little": (changed("sharded", 1.001), "sharded", "factor", 1.001),
}


@pytest.mark.parametrize("bug", BUGS)
def test_each_mistake_is_found_with_its_factor(bug):
    engine, kind, finding, factor = BUGS[bug]
    for seed in range(6):
        model = model_of(seed, 2, 4)
        _, findings, _ = probed(model, engine, Setting(8, accumulation=5, loss_scale=2.0**16))
        its = [f for f in findings if any(name.startswith(kind) for name in f.names)]
        assert {f.kind for f in its} == {finding}, (seed, findings)
        names = {part for f in its for name in f.names for part in name.split(" = ") if part.startswith(kind)}
        assert names == {h.names[0] for held in model.processes for h in held if h.names[0].startswith(kind)}
        for one in its:
            assert one.factor == (None if factor is None else pytest.approx(factor, rel=2e-4)), one
        if engine not in (mean_of_ranks, local):
            assert its == findings, "others are healthy"


def test_the_words_of_factors():
    said = {bug: str(probed(model_of(0, 2, 4), BUGS[bug][0], Setting(8, 5, 2.0**16))[1]) for bug in BUGS}
    words = {
        "1: a replicated weight once a rank": "once on each of the 8 processes that hold it",
        "2: experts on the first rank only": "only what rank 0, 4 holds counts",
        "3: the mean of the ranks' norms": "the norms of the ranks are averaged",
        "experts are forgotten": "it is left out",
        "7: divided by the accumulation twice": "divided by the 5 micro-batches once too often",
        "15: the loss scale": "the loss scale of 65536 is still in it",
        "5: tied, on each stage": "once for each of its 2 names",
    }
    for bug, expected in words.items():
        assert expected in said[bug], said[bug]


def test_one_forgotten_tensor_among_many_is_found_alone():
    model = model_of(3, 1, 2, kinds=("replicated",) * 400)
    lost = model.processes[0][217].names[0]
    index = model.processes[0][217].index

    def engine(model, squares):
        return [math.sqrt(math.fsum(s for i, s in enumerate(squares[0]) if i != index))] * model.world

    _, findings, questions = probed(model, engine)
    assert [(f.names, f.factor) for f in findings] == [((lost,), 0.0)]
    assert len(questions) < 40


@pytest.mark.parametrize("other", range(1, 12))
def test_one_twice_and_another_not_at_all_do_not_cancel(other):
    model = model_of(3, 1, 2, kinds=("replicated",) * 12)

    def engine(model, squares):
        own = squares[0]
        return [math.sqrt(math.fsum(own) + own[0] - own[other])] * model.world

    _, findings, _ = probed(model, engine)
    assert {f.factor for f in findings} == {0.0, 2.0}


def test_errors_that_cancel_in_one_question_are_found_by_the_second():
    """Of 64 tensors with as many sizes the squares of some pairs are one in the first question, and not in both."""
    model = model_of(3, 1, 2, kinds=("replicated",) * 64)
    sizes = [held.numel for held in model.processes[0]]
    squares = [[n * elements_value(i, n, again) ** 2 for i, n in enumerate(sizes)] for again in (False, True)]

    def apart(pair, own):
        return abs(own[pair[0]] - own[pair[1]]) / sum(own)

    hidden = [pair for pair in itertools.combinations(range(64), 2) if apart(pair, squares[0]) < 5e-5]
    assert hidden
    assert all(apart(pair, squares[1]) > 2e-4 for pair in hidden)
    for twice, lost in hidden[:5]:

        def engine(model, squares, twice=twice, lost=lost):
            own = squares[0]
            return [math.sqrt(math.fsum(own) + own[twice] - own[lost])] * model.world

        _, findings, _ = probed(model, engine)
        assert {f.factor for f in findings} == {0.0, 2.0}


@pytest.mark.parametrize(("engine", "kind"), [(mean_of_ranks, "mean"), (first_part_only("sharded"), "ranks")])
@pytest.mark.parametrize("count", [1, 6])
def test_the_mean_of_norms_is_not_what_rank_0_alone_holds(engine, kind, count):
    """With equal parts both are half of the norm on four processes: one number does not tell them apart."""
    model = model_of(2, 1, 4, kinds=("sharded",) * count)
    _, findings, _ = probed(model, engine)
    assert {f.kind for f in findings} == {kind}
    assert {round(f.factor, 6) for f in findings} == {0.25}
    assert kind == "mean" or "only what rank 0 holds counts" in str(findings[0])


@pytest.mark.parametrize(("kinds", "most"), [(("replicated", "sharded"), 4), (("expert", "stage", "tied"), 6)])
def test_a_healthy_engine_of_64_processes_is_asked_twice_a_class(kinds, most):
    model = model_of(5, 8, 8, kinds=kinds)
    _, findings, questions = probed(model, summed(once))
    assert findings == []
    assert len(questions) <= most


def test_64_processes_with_a_mistake():
    model = model_of(5, 8, 8)
    _, findings, _ = probed(model, each_copy("expert"))
    assert {f.factor for f in findings} == {8.0}
    assert {n.partition(".")[0] for f in findings for n in f.names} == {"expert"}


def test_values_differ_where_sizes_do_not():
    """Of two equal squares one could count twice and the other not at all."""
    for first in (0, 64, 640):
        assert len({elements_value(place, 1000) for place in range(first, first + 64)}) == 64


def test_a_coarse_norm_is_asked_for_few_tensors_at_a_time():
    """One forgotten tensor of 400 is less than the rounding of 16 bits."""
    asked = []
    tensors = tensors_of(model_of(3, 1, 2, kinds=("replicated",) * 400).processes)

    def ask(places, rank, again):
        asked.append(len(places))
        return [math.sqrt(sum(tensors[i].numel * elements_value(i, tensors[i].numel, again) ** 2 for i in places))] * 2

    assert Probe(tensors, ask, Setting(2), 1e-2).counts(classes_of(tensors))
    assert max(asked) == 1


def largest(model, squares):
    return [math.sqrt(max(math.fsum(own) for own in squares))] * model.world


def rank_0_alone(model, squares):
    return [math.sqrt(math.fsum(squares[0]))] * model.world


@pytest.mark.parametrize(
    ("engine", "words"),
    [(largest, "the largest of the ranks' norms is taken"), (rank_0_alone, "only what rank 0 holds counts")],
)
@pytest.mark.parametrize("seed", range(6))
def test_parts_that_are_not_added_up_are_no_division(engine, words, seed):
    model = model_of(seed, 1, 2, kinds=("sharded",))
    _, findings, _ = probed(model, engine)
    assert {f.kind for f in findings} == {"ranks"}
    assert all(words in f.message for f in findings)


@pytest.mark.parametrize("said", [None, "sharded", "replicated"])
def test_a_constant_weight_is_no_copy_of_one_that_is_not(said):
    """Experts of which one was set to zero: their weights have nothing in common."""
    gradients = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(12), torch.randn(12, generator=torch.Generator().manual_seed(1))
    processes = [
        [HeldPiece(("expert",), 12, float(g.double().norm()) ** 2, summary_of(g), summary_of(w))]
        for g, w in zip(gradients, weights, strict=True)
    ]
    (tensor,) = tensors_of(processes, said and {"expert": said})
    assert bool(tensor.contradiction) == (said == "replicated")
    assert len(tensor.parts) == (1 if said == "replicated" else 2)
