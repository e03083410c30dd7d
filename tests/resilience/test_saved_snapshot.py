"""A snapshot in files: a new process goes on with the same bits; what is damaged or of another run is refused."""

import multiprocessing
import random

import numpy
import pytest
import torch
from test_snapshot import OPTIMIZERS, Network, batches, content, same, small, step, train
from torch import nn
from torch.distributed import checkpoint

import gradguard as gg
from cases import comparable
from gradguard.errors import InvalidValueError, UnsupportedGradientError

CHOSEN = ["SGD", "SGD, fused", "AdamW, foreach", "AdamW, a tensor as learning rate", "NAdam", "Adafactor", "LBFGS"]


class Cursor:
    """A data loader's place."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Run:
    """Everything that a run has: dropout, tied weights, a schedule, a guard with its detector, a cursor, generators."""

    def __init__(self, name, seed):
        torch.manual_seed(seed)
        self.model = Network()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        detector = gg.SpikeDetector(window=8, warmup=2, cap=2, alone=1)
        self.guard = gg.Guard(self.optimizer, gg.ClipByMedian(warmup=2), spikes=gg.SkipSpikes(detector))
        self.cursor, self.own = Cursor(), torch.Generator().manual_seed(seed)

    @property
    def more(self):
        return [self.schedule, self.guard, self.cursor, self.own]

    def go(self, count):
        for data in batches(self.cursor.at, count):
            self.guard.record_loss(random.random() + float(torch.rand((), generator=self.own)))
            train(self.model, self.optimizer, [data])
            self.schedule.step()
            self.cursor.at += 1
        draws = random.random(), numpy.random.rand(), float(torch.rand(())), float(torch.rand((), generator=self.own))
        return content(self.model, self.optimizer), self.guard.state_dict(), self.schedule.get_last_lr(), draws


def go_on_elsewhere(folder, pipe):
    """What a new process ends with, for each optimizer."""
    found = []
    for number, name in enumerate(CHOSEN):
        run = Run(name, seed=7)
        gg.Snapshot.load(f"{folder}/{number}", run.model, run.optimizer, extra_state=run.more).restore()
        found.append(run.go(4))
    torch.save(found, f"{folder}/found.pt")
    pipe.send("done")


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_same_bits(tmp_path):
    expected = []
    for number, name in enumerate(CHOSEN):
        run = Run(name, seed=1)
        run.go(3)
        snapshot = gg.Snapshot(run.model, run.optimizer, extra_state=run.more)
        snapshot.take()
        expected.append(run.go(4))
        snapshot.save(tmp_path / str(number))  # what was taken, not what is now
        snapshot.restore()
        same(run.go(4)[0], expected[-1][0])
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=go_on_elsewhere, args=(str(tmp_path), theirs))
    process.start()
    assert ours.poll(240)
    process.join()
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    for name, one, other in zip(CHOSEN, found, expected, strict=True):
        torch.testing.assert_close(
            comparable(one), comparable(other), rtol=0, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert len({repr(one) for one in expected}) == len(CHOSEN)


def saved(folder, model=None, optimizer=None, **more):
    if model is None:
        model, optimizer = small()
    step(model, optimizer)
    snapshot = gg.Snapshot(model, optimizer, **more)
    snapshot.take()
    snapshot.save(folder)
    return model, optimizer, snapshot


def test_load_changes_nothing_and_restore_writes_in_place(tmp_path):
    model, optimizer, _ = saved(tmp_path / "a")
    kept = content(model, optimizer)
    places = [p.data_ptr() for p in model.parameters()]
    step(model, optimizer, seed=3)
    later = content(model, optimizer)
    snapshot = gg.Snapshot.load(tmp_path / "a", model, optimizer)
    same(content(model, optimizer), later)
    for _ in range(2):
        snapshot.restore()
        same(content(model, optimizer), kept)
        step(model, optimizer, seed=3)
        same(content(model, optimizer), later)
    assert [p.data_ptr() for p in model.parameters()] == places
    snapshot.take()  # it goes on as one that was taken here
    step(model, optimizer, seed=4)
    snapshot.restore()
    same(content(model, optimizer), later)
    assert snapshot.nbytes == sum(p.numel() for p in model.parameters()) * 12 + 4 * 4


@pytest.mark.parametrize("tensor", [
    torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    torch.randn(4, 3).T,
    torch.randn(3, dtype=torch.complex64),
    torch.tensor([True, False]),
    torch.randn(5).to(torch.float8_e4m3fn),
    torch.randn(0, 3),
    torch.tensor(-0.0, dtype=torch.float64),
    torch.tensor([float("nan"), float("-inf"), 5e-324], dtype=torch.float64),
    torch.eye(3).to_sparse(),
    torch.ones(()).expand(4),
], ids=lambda t: f"{t.dtype} {list(t.shape)} {t.layout}")  # fmt: skip
def test_buffers_of_every_kind_come_back(tmp_path, tensor):
    def model():
        module = nn.Linear(1, 1)
        module.register_buffer("kept", tensor)
        return module, torch.optim.SGD(module.parameters())

    module, optimizer = model()
    snapshot = gg.Snapshot(module, optimizer)
    snapshot.take()
    snapshot.save(tmp_path / "a")
    module, optimizer = model()
    module.kept = torch.zeros_like(tensor)
    gg.Snapshot.load(tmp_path / "a", module, optimizer).restore()
    back = module.kept
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    ours, theirs = (t.to_dense() if t.is_sparse else t for t in (back, tensor))
    assert (
        ours.contiguous().view(-1).view(torch.uint8).tolist() == theirs.contiguous().view(-1).view(torch.uint8).tolist()
    )


def test_extra_state_and_buffers_that_come_and_go(tmp_path):
    class Extra(nn.Linear):
        told = None

        def get_extra_state(self):
            return {"told": self.told}

        def set_extra_state(self, state):
            self.told = state["told"]

    model = nn.Sequential(Extra(3, 1))
    model[0].told = torch.arange(3)
    model[0].register_buffer("cache", torch.ones(5), persistent=False)
    saved(tmp_path / "a", model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = nn.Sequential(Extra(3, 1))
    other[0].register_buffer("cache", None, persistent=False)
    gg.Snapshot.load(tmp_path / "a", other, torch.optim.SGD(other.parameters(), lr=0.3)).restore()
    assert (other[0].told.tolist(), other[0].cache.tolist()) == ([0, 1, 2], [1] * 5)
    same(other[0].weight, model[0].weight)


def adam():
    model, _ = small()
    return model, torch.optim.Adam(model.parameters())


def half():
    model, _ = small()
    return model.bfloat16(), torch.optim.AdamW(model.parameters())


def wide():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters())


def two_groups():
    model, _ = small()
    return model, torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])])


def reordered():
    model, _ = small()
    return model, torch.optim.AdamW([*model.parameters()][::-1])


def with_buffer():
    model, optimizer = small()
    model.register_buffer("more", torch.zeros(1))
    return model, optimizer


OTHERS = {
    "another optimizer": (adam, (), r"what it holds were a module, AdamW, here a module, Adam\."),
    "another dtype": (
        half,
        (),
        r"parameters differ \(0\.weight: float32 \[4, 3\] on cpu, here bfloat16 \[4, 3\] on cpu",
    ),
    "another shape": (wide, (), r"0\.weight: float32 \[4, 3\] on cpu, here float32 \[5, 3\] on cpu"),
    "other groups": (two_groups, (), r"the parameters of AdamW differ \(group 0, parameter 2: .* here none"),
    "another order": (reordered, (), r"the parameters of AdamW differ \(group 0, parameter 0: float32 \[4, 3\] on cpu"),
    "another buffer": (with_buffer, (), "buffers were none, here more"),
    "more things": (small, (Cursor(),), "here a module, AdamW, Cursor"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_before_anything_is_changed(tmp_path, name):
    make, more, words = OTHERS[name]
    saved(tmp_path / "a")
    model, optimizer = make()
    before = content(model, optimizer)
    with pytest.raises(InvalidValueError, match=words):
        gg.Snapshot.load(tmp_path / "a", model, optimizer, extra_state=more)
    same(content(model, optimizer), before)


def test_parameters_of_one_shape_in_another_order_are_refused(tmp_path):
    """As a set lists them, which is another order in each process: all shapes agree."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    orders = [[*model.parameters()], [*model[1].parameters(), *model[0].parameters()]]
    saved(tmp_path / "a", model, torch.optim.AdamW(orders[0]))
    optimizer = torch.optim.AdamW(orders[1])
    words = r"another order \(group 0, parameter 0 was 0\.weight, here 1\.weight; 4 of 4 in all\)"
    with pytest.raises(InvalidValueError, match=words):
        gg.Snapshot.load(tmp_path / "a", model, optimizer)
    gg.Snapshot.load(tmp_path / "a", model, torch.optim.AdamW(orders[0])).restore()


FILE = "process-0.safetensors"


def test_directories_that_hold_none(tmp_path):
    model, optimizer, snapshot = saved(tmp_path / "a")
    with pytest.raises(InvalidValueError, match="exists already: expected a new or empty directory"):
        snapshot.save(tmp_path / "a")
    with pytest.raises(InvalidValueError, match=r"holds no complete snapshot.* its file 'process-0\.safetensors'"):
        gg.Snapshot.load(tmp_path / "none", model, optimizer)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        checkpoint.save({"weight": torch.ones(1)}, checkpoint_id=tmp_path / "b")
    with pytest.raises(InvalidValueError, match=r"b' holds no complete snapshot"):
        gg.Snapshot.load(tmp_path / "b", model, optimizer)
    with pytest.raises(InvalidValueError, match=r"no snapshot to save: call take\(\) first"):
        gg.Snapshot(model, optimizer).save(tmp_path / "c")
    (tmp_path / "a" / FILE).unlink()
    with pytest.raises(InvalidValueError, match="holds no complete snapshot"):
        gg.Snapshot.load(tmp_path / "a", model, optimizer)


def test_an_empty_directory_is_filled_and_keeps_its_rights(tmp_path):
    (tmp_path / "a").mkdir(mode=0o700)
    saved(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert [file.name for file in tmp_path.rglob("*")] == ["a", FILE]


def test_no_damaged_byte_becomes_a_number(tmp_path):
    model, optimizer, _ = saved(tmp_path / "a")
    kept, file, refused = content(model, optimizer), tmp_path / "a" / FILE, 0
    whole = file.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 120):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        other, others = small()
        try:
            gg.Snapshot.load(tmp_path / "a", other, others).restore()
        except InvalidValueError:
            refused += 1
        else:  # a byte that nobody reads
            same(content(other, others), kept)
    assert refused > 100
    for other in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], whole + b"\0", whole + bytes(100_000)):
        file.write_bytes(other)
        with pytest.raises(InvalidValueError, match="cannot be read: a file is missing or damaged"):
            gg.Snapshot.load(tmp_path / "a", model, optimizer)


def test_a_save_draws_no_number_of_the_run(tmp_path):
    model, optimizer, snapshot = saved(tmp_path / "a")
    before = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()
    snapshot.save(tmp_path / "b")
    assert (random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()) == before
    assert gg.Snapshot.load(tmp_path / "b", model, optimizer).taken


def test_what_has_no_form_in_a_file(tmp_path):
    model, optimizer = small()
    optimizer.param_groups[0]["rule"] = lambda step: step
    with pytest.raises(UnsupportedGradientError, match=r"contains something that cannot be written to a file .*lambda"):
        saved(tmp_path / "a", model, optimizer)
    optimizer.param_groups[0]["rule"] = model
    with pytest.raises(UnsupportedGradientError, match=r"cannot be written to a file \(a Sequential\)"):
        saved(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a").exists()


def test_state_of_a_parameter_that_has_gone(tmp_path):
    model, optimizer = small()
    step(model, optimizer)
    del optimizer.param_groups[0]["params"][0]
    snapshot = gg.Snapshot(model, optimizer)
    snapshot.take()
    with pytest.raises(UnsupportedGradientError, match="state of a tensor that is no longer in any of its groups"):
        snapshot.save(tmp_path / "a")
