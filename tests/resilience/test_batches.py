"""Which samples were in a batch: every dataset here returns its own index, which tells each id right or wrong."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.resilience import Batches, MicroBatch, SampleIds


class Own(Dataset):
    """Sample i is {"own": i, "x": noise}."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"own": index, "x": torch.full((2,), float(index))}


class Many(Own):
    def __getitems__(self, indices):
        return [{"own": i, "x": torch.full((2,), float(i))} for i in indices]


class AtOnce(Own):
    """Reads a whole batch in one go: its sampler draws lists."""

    def __getitem__(self, indices):
        return {"own": torch.tensor(indices), "x": torch.zeros(len(indices))}


class Stateful(Own):
    served = 0

    def __getitem__(self, index):
        self.served += 1
        return super().__getitem__(index)

    def state_dict(self):
        return {"served": self.served}

    def load_state_dict(self, state_dict):
        self.served = state_dict["served"]


class Endless(IterableDataset):
    def __iter__(self):
        yield from ({"own": i} for i in range(7))


def as_list(samples):
    return samples


DATA = Own()
LOADERS = {
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "drop_last": lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True),
    "one at a time": lambda: DataLoader(DATA, shuffle=True),
    "no batches": lambda: DataLoader(DATA, batch_size=None, shuffle=True),
    "batches at once": lambda: DataLoader(
        AtOnce(), batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 5, drop_last=False)
    ),
    "__getitems__": lambda: DataLoader(Many(), batch_size=4, shuffle=True),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=[[3, 1], [22], [7, 7, 0]]),
    "with replacement": lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True)),
    "weighted": lambda: DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 23, 12)),
    "distributed": lambda: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 3, 1, seed=5)),
    "custom collate": lambda: DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=as_list),
    "keys": lambda: DataLoader({k: {"own": k} for k in "abcde"}, batch_size=2, sampler=list("ecabd")),
    "two workers": lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=2),
    "workers, any order": lambda: DataLoader(DATA, batch_size=3, shuffle=True, num_workers=2, in_order=False),
    "workers that stay": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
    ),
}


def truth(batch):
    """The indices that the samples themselves tell."""
    owns = [one["own"] for one in batch] if isinstance(batch, list) else batch["own"]
    owns = owns.tolist() if isinstance(owns, torch.Tensor) else owns
    return tuple(owns) if isinstance(owns, list | tuple) else (owns,)


@pytest.mark.parametrize("name", LOADERS)
def test_the_ids_are_those_in_the_batch(name):
    batches, loader = Batches(), LOADERS[name]()
    named = SampleIds(loader, batches)
    seen = 0
    for epoch in range(3):
        if isinstance(loader.sampler, DistributedSampler):
            named.sampler.set_epoch(epoch)
        for count, batch in enumerate(named):
            assert batches.of_step(batches.end_step())[0].ids == truth(batch)
            seen += 1
            if epoch == 1 and count == 1:
                break  # an epoch that is left in the middle
    assert seen == 2 * len(loader) + min(2, len(loader))


@pytest.mark.parametrize("name", [name for name in LOADERS if "any order" not in name])
def test_the_batches_are_those_of_the_loader(name):
    loader = LOADERS[name]()
    torch.manual_seed(1)
    expected = [truth(batch) for batch in loader]
    torch.manual_seed(1)
    named = SampleIds(LOADERS[name](), Batches())
    assert [truth(batch) for batch in named] == expected
    assert len(named) == len(loader)
    assert type(loader.dataset) is not type(named.dataset)  # a copy: the loader itself is as it was


@pytest.mark.parametrize(
    "dataset", [Subset(DATA, [5, 6, 9, 2]), ConcatDataset([Own(3), Own(4)])], ids=["Subset", "ConcatDataset"]
)
def test_the_index_is_that_of_the_dataset_which_the_loader_has(dataset):
    batches = Batches()
    for batch in SampleIds(DataLoader(dataset, batch_size=2, shuffle=True), batches):
        (one,) = batches.of_step(batches.end_step())
        assert truth(default_collate([dataset[i] for i in one.ids])) == truth(batch)


def test_ids_that_the_batch_says():
    batches = Batches()
    for _ in SampleIds(DataLoader(Endless(), batch_size=3), batches, ids_of=lambda batch: batch["own"]):
        batches.end_step()
    assert [batches.of_step(step)[0].ids for step in range(3)] == [(0, 1, 2), (3, 4, 5), (6,)]
    generator = SampleIds(([str(i)] for i in range(2)), batches, ids_of=list)
    assert list(generator) == [["0"], ["1"]]
    assert [one.ids for one in batches.of_step(3)] == [("0",), ("1",)]


class DataLoaderDispatcher(DataLoader):
    pass


def begun():
    loader = LOADERS["workers that stay"]()
    next(iter(loader))
    return loader


REFUSED = {
    "iterable": (lambda: DataLoader(Endless()), InvalidTypeError, r"iterable.*ids_of=lambda batch"),
    "a list": (lambda: [1, 2], InvalidTypeError, r"the loader is list: expected a torch.utils.data.DataLoader"),
    "dispatched": (
        lambda: DataLoaderDispatcher(DATA),
        InvalidTypeError,
        r"dispatch_batches=True.*omit dispatch_batches",
    ),
    "begun": (begun, InvalidValueError, r"has begun already: make SampleIds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_ids_cannot_be_found_it_says_so(name):
    make, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        SampleIds(make(), Batches())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's, under this torch
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Own, Stateful])
def test_a_stateful_loader_goes_on_where_it_was(workers, dataset):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        loader = torchdata.StatefulDataLoader(dataset(), batch_size=3, shuffle=True, num_workers=workers)
        return SampleIds(loader, Batches())

    torch.manual_seed(3)
    named = make()
    reading = iter(named)
    head = [truth(next(reading)) for _ in range(3)]
    state = named.state_dict()
    tail = [truth(batch) for batch in reading]
    torch.manual_seed(99)
    resumed = make()
    resumed.load_state_dict(state)
    again = []
    for batch in resumed:
        again.append(truth(batch))
        assert resumed.batches.of_step(resumed.batches.end_step())[0].ids == truth(batch)
    assert again == tail
    assert sorted(sum(head + tail, ())) == list(range(23))
    if dataset is Stateful and not workers:  # its own state went through
        assert state["dataset_state"] == {"served": 9}
        assert resumed.dataset.served == 23


class Moved(Own):
    by = 0

    def __getitem__(self, index):
        return {"own": index, "x": index + self.by}


def move(_):
    torch.utils.data.get_worker_info().dataset.by = 100


def test_what_a_worker_init_fn_sets_is_set():
    batches = Batches()
    for batch in SampleIds(DataLoader(Moved(), num_workers=1, batch_size=23, worker_init_fn=move), batches):
        assert batch["x"].tolist() == list(range(100, 123))
        assert batches.of_step(0)[0].ids == truth(batch)


# The ring.


def test_micro_batches_and_their_losses():
    batches = Batches()
    loss = torch.tensor([3.0], requires_grad=True)
    batches.saw([4, 7])
    batches.record_loss(loss)
    batches.saw(["a"])
    batches.record_loss(5)
    batches.record_loss(torch.tensor(6.0))
    with torch.no_grad():
        loss *= 100  # what is remembered does not follow
    assert batches.end_step() == 0
    assert batches.end_step() == 1
    batches.saw()
    assert batches.of_step(0) == (
        MicroBatch(0, 0, 0, (4, 7), 3.0),
        MicroBatch(0, 0, 1, ("a",), 5.0),
        MicroBatch(0, 0, 2, None, 6.0),
    )
    assert batches.of_step(1) == ()
    assert batches.of_step(2) == (MicroBatch(2, 0, 0, None, None),)


IDS = {
    "list": ([1, 2], (1, 2)),
    "tuple of str": (("a", "b"), ("a", "b")),
    "range": (range(2), (0, 1)),
    "one": (5, (5,)),
    "one str": ("doc-5", ("doc-5",)),
    "tensor": (torch.tensor([3, 4]), (3, 4)),
    "0-dim tensor": (torch.tensor(3), (3,)),
    "tensors": ([torch.tensor(3), torch.tensor(4)], (3, 4)),
    "array": (np.array([3, 4]), (3, 4)),
    "numbers of NumPy": ([np.int64(3)], (3,)),
    "none": ([], ()),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_of_many_kinds(name):
    given, expected = IDS[name]
    batches = Batches()
    batches.saw(given)
    ids = batches.of_step(0)[0].ids
    assert ids == expected
    assert {type(one) for one in ids} <= {int, str}


def test_a_tensor_of_ids_that_is_overwritten():
    batches, ids = Batches(), torch.tensor([1, 2])
    batches.saw(ids)
    ids.zero_()
    assert batches.of_step(0)[0].ids == (1, 2)


@pytest.mark.parametrize(
    ("ids", "came"),
    [
        ([1.5], "such as 1.5"),
        ([True], "such as True"),
        ([(1, 2)], r"such as \(1, 2\)"),
        (torch.tensor([1.0]), "such as 1.0"),
        (torch.tensor([[1]]), r"of shape \(1, 1\)"),
        (torch.tensor([True]), "such as True"),
        (np.array([[1]]), r"such as \[1\]"),
        ({1, 2}, "set"),
        (1.5, "float"),
    ],
)
def test_ids_that_nothing_could_be_excluded_by(ids, came):
    with pytest.raises(InvalidTypeError, match=f"the ids of a batch are {came}: expected whole numbers or strings"):
        Batches().saw(ids)


@pytest.mark.parametrize(
    ("loss", "came"),
    [(torch.ones(2), r"of shape \(2,\)"), ("low", "str"), (torch.ones((), dtype=torch.cfloat), "of")],
)
def test_a_loss_that_is_no_number(loss, came):
    with pytest.raises(InvalidTypeError, match=f"the loss of a micro-batch is {came}"):
        Batches().record_loss(loss)


def test_the_ring_forgets_and_says_so():
    batches = Batches(3)
    for number in range(5):
        batches.saw(number)
        batches.end_step()
    assert batches.known == range(3, 6)
    assert batches.of_step(3)[0].ids == (3,)
    for step in (2, 6, -1):
        with pytest.raises(InvalidValueError, match=f"step {step} is not in the ring, which holds 3 to 5"):
            batches.of_step(step)
    with pytest.raises(InvalidValueError, match="steps=1: expected at least 2"):
        Batches(1)


def test_counting_goes_on_after_a_resume():
    batches = Batches()
    batches.end_step()
    other = Batches()
    other.saw(3)
    other.load_state_dict(batches.state_dict())
    assert (other.step, other.known, other.of_step(1)) == (1, range(1, 2), ())


def test_a_batch_that_is_kept_and_one_that_was_changed():
    batches, loader = Batches(keep=True), DataLoader(DATA, batch_size=2)
    for batch in SampleIds(loader, batches):
        expected = torch.rand(3)  # as dropout would draw
        content, generators = batches.content(0, 0)
        assert content is batch
        torch.set_rng_state(generators["torch"])
        assert torch.equal(torch.rand(3), expected)
        batch["x"] /= 255
        with pytest.raises(InvalidValueError, match="micro-batch 0 of step 0 was changed in place"):
            batches.content(0, 0)
        break
    with pytest.raises(InvalidValueError, match="micro-batch 1 of step 0 was not kept"):
        batches.content(0, 1)
    without = Batches()
    without.saw(1, batch=content)
    with pytest.raises(InvalidValueError, match=r"was not kept. Create Batches\(keep=True\)"):
        without.content(0, 0)
