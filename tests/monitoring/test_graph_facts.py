"""What the graph of a loss tells before its backward: the order of parameters, types, factors, and where NaN began."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.monitoring.observe.graph_facts import GraphFacts, origin_of
from gradguard.monitoring.record.file import read_record


def read(loss, scaled=False):
    facts = GraphFacts()
    facts.read(loss, scaled)
    return facts


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_parameters_stand_in_the_order_of_the_forward_and_not_of_the_list():
    last, first = nn.Linear(8, 2), nn.Linear(4, 8)
    facts = read(last(first(torch.ones(3, 4))).sum())
    order = [one["order"] for one in facts.of([*last.parameters(), *first.parameters()])]
    assert min(order[:2]) > max(order[2:])
    assert facts.of([nn.Parameter(torch.ones(2))]) == [{}]
    assert len(facts.leaves) == 4


def test_a_recurrent_weight_has_many_uses():
    rnn = nn.RNN(3, 5, batch_first=True)
    facts = read(rnn(torch.ones(2, 7, 3))[0].sum()).of(list(rnn.parameters()))
    uses = {name: one.get("uses", 1) for (name, _), one in zip(rnn.named_parameters(), facts, strict=True)}
    assert uses["weight_hh_l0"] == 7


@pytest.mark.parametrize(
    ("of", "factor"),
    [
        (lambda loss: loss, None),
        (lambda loss: loss / 4, 0.25),
        (lambda loss: loss * 0.5, 0.5),
        (lambda loss: loss / loss.detach(), None),
    ],
)
def test_what_the_loss_was_multiplied_by(of, factor):
    loss = model()(torch.ones(3, 4)).square().mean()
    found = read(of(loss)).factor
    assert found == factor or (factor is None and found == pytest.approx(1 / loss.item()))


@pytest.mark.parametrize(
    ("loss_of", "doubled"),
    [
        (lambda out, y: functional.cross_entropy(out.softmax(1), y), ("LogSoftmax", "Softmax")),
        (lambda out, y: functional.cross_entropy(out.sigmoid().view(3, 2), y), ("LogSoftmax", "Sigmoid")),
        (
            lambda out, y: functional.binary_cross_entropy_with_logits(out.sigmoid()[:, 0], y.float()),
            ("BinaryCrossEntropyWithLogits", "Sigmoid"),
        ),
        (lambda out, y: functional.cross_entropy(out, y), None),
        (lambda out, y: functional.nll_loss(out.softmax(1).log(), y), None),
        (lambda out, y: functional.cross_entropy(out.softmax(1) @ torch.ones(2, 2), y), None),
        (lambda out, y: functional.cross_entropy(out.log_softmax(1), y), None),
        (lambda out, y: functional.binary_cross_entropy(out[:, 0].sigmoid(), y.float()), None),
        (lambda out, y: functional.kl_div(out.log_softmax(1), out.detach().softmax(1)), None),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_a_loss_that_takes_probabilities_for_scores(loss_of, doubled):
    assert read(loss_of(model()(torch.ones(3, 4)), torch.tensor([0, 1, 1]))).doubled == doubled


def test_a_scaled_loss_is_read_below_its_scale():
    loss = model()(torch.ones(3, 4)).square().mean() / 2
    assert read(loss * 65536.0, scaled=True).factor == 0.5


def test_types_of_operations_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model()(torch.ones(3, 4)).float().sum()
    assert read(loss).dtypes == {"bfloat16", "float32"}


def overflow():
    with torch.autocast("cpu", dtype=torch.float16):
        return (model()(torch.ones(3, 4)) * 1e7).float().square().mean()


def sick_weights():
    net = model()
    with torch.no_grad():
        net[2].weight[0, 0] = torch.nan
    return net(torch.ones(3, 4)).square().mean()


@pytest.mark.parametrize(
    ("loss", "origin"),
    [
        (overflow, ("Mul", "float16")),
        (sick_weights, ("weights", "float32")),
        (lambda: model()(torch.full((3, 4), torch.nan)).sum(), ("data", "float32")),
        (lambda: (model()(torch.ones(3, 4)) * 100).exp().exp().sum(), ("Exp", "float32")),
        (lambda: torch.tensor(torch.nan, requires_grad=True), None),
    ],
)
def test_where_a_number_first_was_not_finite(loss, origin):
    assert origin_of(loss()) == origin


def test_what_a_checkpoint_has_packed_away_is_left_alone():
    net = model()
    loss = checkpoint(net, torch.full((3, 4), torch.nan), use_reentrant=False).sum()
    assert origin_of(loss) is None
    loss.backward()
    assert net[0].weight.grad is not None


def test_a_record_holds_it(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gg.watch(tmp_path / "run.jsonl") as watch:
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                x = torch.full((3, 4), torch.nan if step == 2 else 1.0)
                (functional.cross_entropy(net(x).softmax(1), torch.tensor([0, 1, 0])) / 2).backward()
            optimizer.step()
    assert watch.path is not None
    record = read_record(watch.path)
    assert (record.meta["compute"], record.meta["leaves"], record.meta["loss_factor"]) == (["float32"], 4, 0.5)
    assert record.meta["doubled"] == ["LogSoftmax", "Softmax"]
    assert [one["order"] for one in record.meta["params"]] == [0, 1, 2, 3]
    assert list(record.steps.column("backwards")) == [2] * 4
    assert list(record.steps.column("origin")) == [None, None, ["data", "float32"], None]
    assert record.dropped == 0
    assert json.loads(watch.path.read_text().splitlines()[0])["t"] == "meta"


def test_steps_of_an_optimizer_without_gradients_are_counted(tmp_path):
    net, other = model(), model()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with gg.watch(tmp_path / "run.jsonl") as watch:
        for _ in range(12):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    assert watch.path is not None
    record = read_record(watch.path)
    assert record.end is not None
    assert record.end["idle_steps"] == 12
    assert not any("order" in one for one in record.meta["params"])
