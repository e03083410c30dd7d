"""The list of bad samples and its file; the samplers, beside the same ones without a list."""

import copy
import json
import pickle

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gradguard.errors import InvalidTypeError, InvalidValueError, RecordError
from gradguard.resilience import BadSample, BadSamples, Batches, SampleIds, exclude

DATA = list(range(40))
BAD = [0, 3, 17, 18, 19, 39]


def listed(ids=BAD):
    bad = BadSamples()
    bad.add(ids)
    return bad


def seeded(seed=7):
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(DATA),
    "random": lambda: RandomSampler(DATA, generator=seeded()),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=100, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(0, 40, 3), generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([float(i % 3) for i in range(40)], 60, generator=seeded()),
    "distributed": lambda: DistributedSampler(DATA, 3, 1),
    "list": lambda: [0, 5, 3, 8],
    "batches": lambda: BatchSampler(RandomSampler(DATA, generator=seeded()), 6, drop_last=False),
    "list of batches": lambda: [[0, 3], [17, 18, 19], [5]],
}


def flat(drawn):
    return [i for one in drawn for i in (one if isinstance(one, list) else [one])]


@pytest.mark.parametrize("name", SAMPLERS)
def test_only_the_bad_are_replaced_and_nothing_moves(name):
    plain, excluded = list(SAMPLERS[name]()), exclude(SAMPLERS[name](), listed())
    for _ in range(2):
        drawn = list(exclude(SAMPLERS[name](), listed()))
        assert [len(one) if isinstance(one, list) else 1 for one in drawn] == [
            len(one) if isinstance(one, list) else 1 for one in plain
        ]
        changed = [(a, b) for a, b in zip(flat(plain), flat(drawn), strict=True) if a != b]
        assert {a for a, _ in changed} == {a for a in flat(plain) if a in BAD}
        assert not {b for _, b in changed} & set(BAD)
        assert {b for _, b in changed} <= set(flat(plain)) | set(excluded.indices)
    assert len(excluded) == len(SAMPLERS[name]())


class Tensors(Sampler):
    """As many a sampler by hand: it iterates over a tensor or an array."""

    def __init__(self, drawn):
        self.drawn = drawn

    def __iter__(self):
        return iter(self.drawn)

    def __len__(self):
        return len(self.drawn)


@pytest.mark.parametrize(
    "source",
    [
        Tensors(torch.arange(8)),
        Tensors(numpy.arange(8)),
        Tensors(torch.arange(8).split(4)),
        Tensors([numpy.arange(4), numpy.arange(4, 8)]),
        Tensors([[torch.tensor(3), 1], [2, torch.tensor(0)]]),
        SubsetRandomSampler(torch.arange(8)),
        list(torch.arange(8)),
    ],
    ids=["tensor", "array", "batches as tensors", "batches as arrays", "lists of tensors", "subset", "list"],
)
@pytest.mark.parametrize("replacements", [range(8), torch.tensor([2, 3, 5]), numpy.array([2, 3, 5])], ids=type)
def test_indices_that_are_tensors_or_arrays(source, replacements):
    drawn = list(exclude(source, listed([2, 3]), replacements=replacements))
    indices = [int(i) for one in drawn for i in (one if getattr(one, "ndim", 1) and hasattr(one, "__len__") else [one])]
    plain = [int(i) for one in source for i in (one if getattr(one, "ndim", 1) and hasattr(one, "__len__") else [one])]
    assert not {2, 3} & set(indices)
    if not isinstance(source, SubsetRandomSampler):
        assert [a for a, b in zip(plain, indices, strict=True) if a != b] == [i for i in plain if i in (2, 3)]


def test_a_list_that_is_none_of_ours_is_refused():
    with pytest.raises(InvalidTypeError, match="expected BadSamples"):
        exclude(range(8), {2, 3}, replacements=range(8))


@pytest.mark.parametrize(
    ("name", "allowed"), [("subset", range(0, 40, 3)), ("weighted", [i for i in range(40) if i % 3])]
)
def test_what_is_held_out_is_never_drawn(name, allowed):
    for seed in range(20):
        bad = listed(torch.randperm(40, generator=seeded(seed))[:20].tolist())
        assert set(exclude(SAMPLERS[name](), bad)) <= set(allowed) - {one.id for one in bad}


def test_an_empty_list_changes_nothing_and_one_that_grows_acts_at_once():
    bad = BadSamples()
    sampler = exclude(SequentialSampler(DATA), bad)
    assert list(sampler) == DATA
    reading = iter(sampler)
    assert next(reading) == 0
    bad.add([1, 0])
    rest = list(reading)
    assert rest[1:] == DATA[2:]
    assert rest[0] not in (0, 1)


def test_ranks_have_as_many_batches_each_and_their_other_samples():
    bad = listed(range(0, 40, 2))
    for rank in range(3):
        make = lambda rank=rank: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 3, rank))  # noqa: E731
        plain, loader = make(), exclude(make(), bad)
        for epoch in range(3):
            plain.sampler.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            before, after = [b.tolist() for b in plain], [b.tolist() for b in loader]
            assert [len(b) for b in before] == [len(b) for b in after]
            assert all(a == b for a, b in zip(flat(before), flat(after), strict=True) if a % 2)
            assert all(b % 2 for b in flat(after))


def test_ids_that_are_no_indices():
    names = [f"doc-{i}" for i in range(40)]
    drawn = list(exclude(SequentialSampler(DATA), listed(["doc-3", 5]), id_of=names.__getitem__))
    assert [i for i in DATA if drawn[i] != i] == [3]


def test_bad_samples_that_were_found_are_left_out_in_the_next_epoch():
    bad, batches = BadSamples(), Batches()
    loader = SampleIds(exclude(DataLoader(DATA, batch_size=4, shuffle=True), bad), batches)
    for batch in loader:
        step = batches.end_step()
        if 11 in batch.tolist():
            bad.add(batches.of_step(step)[0].ids, reason="spike", step=step)
    assert len(bad) == 4
    assert 11 in bad
    assert not any(i in bad for batch in loader for i in batch.tolist())


class Reverse(Sampler):
    def __iter__(self):
        return iter(range(9, -1, -1))

    def __len__(self):
        return 10


class Half(RandomSampler):
    """A user's subclass may draw fewer samples than its parent."""

    def __iter__(self):
        return (i for i in super().__iter__() if i < 20)


class Lines(IterableDataset):
    def __iter__(self):
        yield from "abc"


def begun():
    loader = DataLoader(DATA, num_workers=1, persistent_workers=True)
    next(iter(loader))
    return loader


REFUSED = {
    "own sampler": (Reverse, {}, InvalidTypeError, r"Reverse draws is not known.*replacements=train_indices"),
    "subclass": (lambda: Half(DATA), {}, InvalidTypeError, r"Half draws is not known"),
    "own in a batch sampler": (lambda: BatchSampler(Half(DATA), 2, False), {}, InvalidTypeError, r"Half draws"),
    "iterable": (lambda: DataLoader(Lines()), {}, InvalidTypeError, r"pass over those in the list where it reads"),
    "begun": (begun, {}, InvalidValueError, r"has begun already: call exclude\(loader, bad\) before"),
    "nothing": (list, {}, InvalidValueError, r"replacements is empty"),
    "none": (Reverse, {"replacements": []}, InvalidValueError, r"replacements is empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_excluded_from_says_so(name):
    make, options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        exclude(make(), listed(), **options)


def test_a_sampler_of_ones_own_says_what_to_draw():
    drawn = list(exclude(Reverse(), listed([9, 4]), replacements=[1, 2]))
    assert drawn[0] in (1, 2)
    assert drawn[1:5] == [8, 7, 6, 5]


def test_where_all_are_bad_it_stops_and_where_one_is_left_it_is_drawn(tmp_path):
    bad = BadSamples(tmp_path / "bad.jsonl")
    bad.add(range(9))
    assert list(exclude(SequentialSampler(range(10)), bad)) == [9] * 10
    bad.add(9)
    with pytest.raises(InvalidValueError, match=r"all 10 samples are in the list of bad ones in .*bad\.jsonl"):
        list(exclude(SequentialSampler(range(10)), bad))


def test_it_can_be_copied_and_pickled():
    sampler = exclude(SequentialSampler(DATA), listed())
    for other in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert list(other) == list(sampler)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's, under this torch
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "stateful sampler", "in order", "sampler by hand"])
def test_a_stateful_loader_goes_on_where_it_was(kind, workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    from torchdata.stateful_dataloader.sampler import RandomSampler as Random
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def make(bad):
        options = {
            "shuffled": lambda: {"shuffle": True},
            "stateful sampler": lambda: {"sampler": StatefulDistributedSampler(DATA, 2, 1)},
            "in order": dict,
            "sampler by hand": lambda: {"sampler": exclude(Random(DATA), bad)},
        }[kind]()
        loader = torchdata.StatefulDataLoader(DATA, batch_size=3, num_workers=workers, **options)
        return loader if kind == "sampler by hand" else exclude(loader, bad)

    bad = listed()
    torch.manual_seed(3)
    loader = make(bad)
    reading = iter(loader)
    for _ in range(3):
        next(reading)
    state = loader.state_dict()
    tail = [b.tolist() for b in reading]
    torch.manual_seed(99)
    resumed = make(bad)
    resumed.load_state_dict(state)
    assert [b.tolist() for b in resumed] == tail
    torch.manual_seed(99)
    more = make(listed([*BAD, tail[0][0], tail[1][1]]))  # the list has grown meanwhile: nothing moves
    more.load_state_dict(state)
    grown = [b.tolist() for b in more]
    assert len(flat(grown)) == len(flat(tail))
    moved = [(a, b) for a, b in zip(flat(tail), flat(grown), strict=True) if a != b]
    assert {tail[0][0], tail[1][1]} <= {a for a, _ in moved}
    assert all(a in more_bad(tail) for a, _ in moved)


def more_bad(tail):
    return {tail[0][0], tail[1][1]}


# The file.


def test_the_file_is_read_back_and_appended_to(tmp_path):
    file = tmp_path / "bad.jsonl"
    first = BadSamples(file)
    assert len(first) == 0
    assert first.add([17, "17", "Tübingen"], reason="loss 9 σ", step=4, rank=1) == 3
    assert first.add([17, 5], reason="again") == 1
    second = BadSamples(file)
    assert [*second] == [*first]
    assert next(iter(second)) == BadSample(17, "loss 9 σ", 4, 1)
    assert {17, "17", "Tübingen", 5} == {one.id for one in second}
    assert json.loads(file.read_text(encoding="utf-8").splitlines()[3]) == {"id": 5, "reason": "again"}
    assert second.add(5) == 0
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4


def test_samples_come_in_the_order_given_without_doubles():
    bad = BadSamples()
    assert bad.add([5, 3, 5, 9, 3], gather=True) == 3  # of one process
    assert [one.id for one in bad] == [5, 3, 9]


def test_a_list_by_hand(tmp_path):
    file = tmp_path / "bad.txt"
    file.write_text('# from the logs\n17\n\n017\n-3\ndoc-5\n{"id": "x", "who": "me"}\n1.5\nlast', encoding="utf-8")
    bad = BadSamples(file)
    assert [one.id for one in bad] == [17, "017", -3, "doc-5", "x", "1.5", "last"]
    bad.add(4)  # the last line had no end
    assert [one.id for one in BadSamples(file)][-2:] == ["last", 4]


@pytest.mark.parametrize(
    "line", ['{"id": 17, "rea', '{"step": 3}', '{"id": 1.5}', '{"id": true}', '{"id": null}', '{"id": [1]}']
)
def test_a_line_that_is_no_sample(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"id": 1}}\n{line}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"bad\.jsonl, line 2: .* is no sample, or it is cut off"):
        BadSamples(file)


def test_ids_that_are_none():
    with pytest.raises(InvalidTypeError, match=r"the ids of a batch are such as 1\.5"):
        BadSamples().add([1.5])


def test_what_a_full_disk_did_not_take_is_written_with_the_next(tmp_path):
    file = tmp_path / "bad.jsonl"
    bad = BadSamples(file)
    file.mkdir()  # as good as full
    with pytest.warns(RuntimeWarning, match="2 bad samples were not written to .*bad.jsonl"):
        assert bad.add([3, 4]) == 2
    assert 3 in bad
    file.rmdir()
    bad.add([5])
    assert [one.id for one in BadSamples(file)] == [3, 4, 5]


def test_a_full_disk_leaves_no_empty_list(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    file = tmp_path / "bad.jsonl"
    bad = BadSamples(file)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", full)
        with pytest.warns(RuntimeWarning, match="1 bad samples were not written to .*No space left"):
            bad.add(3)
    assert not file.exists()
    bad.add(4)
    assert [one.id for one in BadSamples(file)] == [3, 4]
