"""The audit of a norm on processes: DTensors in every layout, DDP, FSDP1, FSDP2, Megatron's parameters."""

import ast
import math
import random
import re
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from random_layouts import Item, Meshes, _spread, case_of
from test_fsdp1 import wrapped
from threads import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from training import Network, batch

import gradguard as gg
from gradguard.audit.in_script import AuditDone, ScriptAudit
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.monitoring.observe.meta import living_modules
from gradguard.script_events import listening


@pytest.fixture(scope="module")
def threads():
    with ranks(4) as run:
        yield run


def listed(parameters):
    """A module that has these parameters."""
    model = nn.Module()
    for i, p in enumerate(parameters):
        model.register_parameter(f"p{i}", p)
    return model


def of_items(items, meshes):
    found = []
    for item in items:
        p = nn.Parameter(_spread(item, meshes, False))
        if item.placements == item.of_gradient:  # weights that are not constant, alike on copies
            p = nn.Parameter(_spread(item, meshes, True))
        p.grad = _spread(item, meshes, True)
        found.append(p)
    return listed(found)


def bits(model):
    return [(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone() for p in model.parameters()]


def random_models(seeds, norm_of):
    """The audits of models whose parameters lie in random ways over all processes."""
    meshes = Meshes()
    spanning = {i for i, mesh in enumerate(meshes.all) if mesh.size() == meshes.world}
    found = []
    for seed in seeds:
        items = [i for i in case_of(seed, meshes).items if i.mesh in spanning and i.gradient_mesh == i.mesh]
        items = [Item(**{**vars(i), "absent": frozenset(), "same_gradient_as": None}) for i in items]
        items = [i for i in items if not any(getattr(p, "reduce_op", "") == "product" for p in i.of_gradient)]
        items = [i for i in items if not any(p.is_partial() for p in i.placements) and math.prod(i.shape)]
        if not items:
            continue
        model = of_items(items, meshes)
        before, objects = bits(model), [p.grad for p in model.parameters()]
        audit = gg.audit_norm(model, lambda model=model: norm_of(model))
        same = all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
        same &= all(a is p.grad for a, p in zip(objects, model.parameters(), strict=True))
        whole = [p.grad.full_tensor().to(torch.complex128).flatten() for p in model.parameters()]
        found.append((seed, audit, same, float(torch.linalg.vector_norm(torch.cat(whole)))))
    return found


def right(model):
    return gg.clip_grad_norm_(model, 1.0)


def own_part(model):
    return math.sqrt(sum(float((g.to(torch.complex128)).abs().square().sum()) for g in bits(model)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", [0, 100])
def test_healthy_dtensors_pass(threads, start):
    for found in threads(lambda rank: random_models(range(start, start + 30), right)):
        assert not isinstance(found, BaseException), found
        assert len(found) > 8
        for seed, audit, same, whole in found:
            assert audit, (seed, str(audit))
            assert same, seed
            assert audit.true_norm == pytest.approx(whole, rel=1e-5), seed


def test_local_norms_of_dtensors_fail_wherever_something_is_split(threads):
    for found in threads(lambda rank: random_models(range(40), own_part)):
        for seed, audit, same, _ in found:
            split = any("parts" in c.layout for c in audit.classes)
            assert audit.verdict == ("FAIL" if split else audit.verdict), seed
            assert not split or {f.kind for f in audit.findings} & {"local", "disagree", "factor"}
            assert same, seed


def test_an_empty_part_is_no_doubt(threads):
    def audit(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
        weight, gradient = torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0))
        row = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
        row.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
        model = listed([row])
        return gg.audit_norm(model, lambda: gg.clip_grad_norm_(model, math.inf)), float(gradient.norm())

    for found, right in threads(audit):
        assert found.verdict == "PASS", str(found)
        assert found.true_norm == pytest.approx(right, rel=1e-6)


def small(kind, seed=0):
    """A network on this process, with its own samples; ``kind`` says how it lies."""
    torch.manual_seed(seed)
    model = Network()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model.first)
        fully_shard(model)
    x, y = batch(0)
    part = slice(dist.get_rank(), None, dist.get_world_size())
    F.mse_loss(model(x[part]), y[part]).backward()
    return model


def grads(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


NORMS = {
    "gradguard": lambda model: gg.clip_grad_norm_(model, 0.1),
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "fsdp1": lambda model: model.clip_grad_norm_(0.1),
}


def audited(kind, call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        if kind.startswith("fsdp1"):
            model, _ = wrapped("NO_SHARD" if "no shard" in kind else "FULL_SHARD", "original" in kind)
        else:
            model = small(kind)
        before = bits(model) if "fsdp1" not in kind else [g.clone() for g in grads(model)]
        audit = gg.audit_norm(model, lambda: NORMS[call](model), max_norm=0.1)
        after = bits(model) if "fsdp1" not in kind else grads(model)
    return audit, all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


HEALTHY = [
    ("ddp", "torch"), ("ddp", "gradguard"), ("fsdp2", "torch"), ("fsdp2", "gradguard"),
    ("fsdp1", "gradguard"), ("fsdp1", "fsdp1"), ("fsdp1 original", "gradguard"), ("fsdp1 original", "fsdp1"),
    ("fsdp1 no shard", "torch"), ("fsdp1 no shard original", "fsdp1"),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("world", "kind", "call"),
    [(2, *row) for row in HEALTHY] + [(4, *row) for row in HEALTHY if row[0] == "fsdp2"],  # else as on two
)
def test_healthy_norms_pass(pool, kind, call, world):
    for audit, same in pool(world).run(audited, kind, call):
        assert audit, str(audit)
        assert same
        assert audit.processes == world


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 original"])
def test_torchs_clip_on_the_local_parts_of_fsdp1_fails(pool, kind):
    """Fact 19: what the rank holds itself, and gradients multiplied by another number on each."""
    for audit, same in pool(2).run(audited, kind, "torch"):
        assert audit.verdict == "FAIL"
        assert {f.kind for f in audit.findings} == {"local", "coefficient"}
        assert same


def inside_no_sync():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Network())
    x, y = batch(0)
    with model.no_sync():
        F.mse_loss(model(x + dist.get_rank()), y).backward()
    return gg.audit_norm(model)


def test_copies_that_were_not_added_up_fail(pool):
    """Fact 11."""
    for audit in pool(2).run(inside_no_sync):
        assert [f.kind for f in audit.findings] == ["copies"]
        assert len(audit.findings[0].names) == len(list(Network().parameters()))


def raising(rank):
    model = small("fsdp2")
    before = bits(model)

    def norm():
        for g in grads(model):
            g.mul_(0)
        if dist.get_rank() == rank:
            raise RuntimeError("no norm today")
        return 1.0

    with pytest.raises((RuntimeError, UnsupportedGradientError), match="no norm today"):
        gg.audit_norm(model, norm)
    return all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_are_as_before_where_the_norm_function_raises(pool, rank):
    assert pool(2).run(raising, rank) == [True, True]


def megatron(rank, world, attributes):
    """Parameters of a tensor and expert parallel layer as Megatron keeps them: ordinary tensors, ``main_grad``."""
    random.seed(1)
    model = nn.Module()
    generator = torch.Generator().manual_seed(7)
    for name, split, weight in [
        ("column", True, None), ("column_bias", True, 0.0), ("norm", False, 1.0), ("router", False, None),
        ("expert", True, None),
    ]:  # fmt: skip
        both = torch.randn(2, world, 6, generator=generator)
        part = rank if split else 0
        p = nn.Parameter(both[0, part] if weight is None else torch.full((6,), weight))
        p.main_grad = both[1, part].clone()
        if attributes and name.startswith("column"):
            p.tensor_model_parallel, p.partition_dim = True, 0
        if attributes and name == "expert":
            p.allreduce = False
        model.register_parameter(name, p)
    return model


def megatron_norm(model, mistake):
    """What Megatron does: squares of what is no duplicate, added up over the tensor parallel ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for name, p in model.named_parameters():
        split = name.startswith("column") or name == "expert"
        counts = split or dist.get_rank() == 0
        if mistake == "norm counted" and name == "norm":  # fact 1: the attribute says tensor_model_parallel
            counts = True
        if mistake == "replicated counted" and not split:
            counts = True
        if mistake == "experts on rank 0" and name == "expert":  # fact 2
            counts = dist.get_rank() == 0
        total += p.main_grad.double().square().sum() * counts
    dist.all_reduce(total)
    return total.sqrt()


MEGATRON = {
    "": set(),
    "norm counted": {("factor", ("norm",), 4.0)},
    "replicated counted": {("factor", ("norm", "router"), 4.0)},
    "experts on rank 0": {("ranks", ("expert",), 0.25)},
}


@pytest.mark.parametrize("mistake", MEGATRON)
def test_megatrons_parameters(threads, mistake):
    def audit(rank):
        model = megatron(rank, 4, True)
        return gg.audit_norm(model, lambda: megatron_norm(model, mistake))

    for found in threads(audit):
        assert {(f.kind, f.names, f.factor and round(f.factor, 3)) for f in found.findings} == MEGATRON[mistake]


def test_what_values_do_not_tell_is_asked_for(threads):
    def audit(rank, groups=None):
        model = megatron(rank, 4, False)
        return gg.audit_norm(model, lambda: megatron_norm(model, ""), groups=groups)

    for found in threads(audit):
        assert found.verdict == "INCONCLUSIVE"
        assert [(f.kind, f.names) for f in found.findings] == [("unknown", ("column_bias",))]
        assert "groups={'column_bias': 'sharded'}" in found.findings[0].message
    assert all(threads(lambda rank: audit(rank, {"column*": "sharded"})))
    for found in threads(lambda rank: audit(rank, {"column_bias": "replicated"})):
        assert found.findings[0].kind == "copies"


def experts(rank, count=2):
    """Experts of each rank that began alike, with norms that are constant, beside layers that all ranks hold."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(count)]
    model = nn.ModuleDict({"shared": nn.Linear(4, 4), "experts": nn.ModuleList(blocks), "3": nn.LayerNorm(4)})
    for i, (name, p) in enumerate(model.named_parameters()):  # the ranks are threads, which share torch's generator
        of_weight, of_rank = (torch.Generator().manual_seed(i + 1000 * k) for k in (0, 1 + rank * ("experts" in name)))
        if name.startswith("shared") or ".0." in name[len("experts.0") :]:
            p.data = torch.randn(p.shape, generator=of_weight)
        p.grad = torch.randn(p.shape, generator=of_rank)
    return model


def norm_of_experts(model):
    squares = {n: p.grad.double().square().sum() for n, p in model.named_parameters()}
    parts = sum(s for n, s in squares.items() if "experts" in n)
    dist.all_reduce(parts)
    return (parts + sum(s for n, s in squares.items() if "experts" not in n)).sqrt()


@pytest.mark.parametrize(
    "passed", [None, {"3.*": "replicated"}, {"experts.0.0.*": "sharded", "experts.*.1.bias": "sharded"}]
)
def test_a_hint_followed_once_gives_the_verdict(threads, passed):
    """Whichever of the hints: it has all tensors that nothing is said of, and what was said before."""

    def audit(rank, groups):
        model = experts(rank)
        return gg.audit_norm(model, lambda: norm_of_experts(model), groups=groups), float(norm_of_experts(model))

    first, _ = threads(lambda rank: audit(rank, passed))[0]
    assert [f.kind for f in first.findings] == ["copies", "unknown", "factor"]
    for finding in first.findings[:2]:
        hint = ast.literal_eval(re.search(r"groups=({.*?})", finding.message)[1])
        assert hint.items() >= (passed or {}).items()
        for followed, true in threads(lambda rank, hint=hint: audit(rank, hint)):
            assert followed.verdict == "PASS", str(followed)
            assert followed.true_norm == pytest.approx(true, rel=1e-6)


def test_many_experts_are_one_pattern_for_each_of_their_tensors(threads):
    (audit, *_) = threads(lambda rank: gg.audit_norm(experts(rank, 40)))
    hints = [re.search(r"groups=({.*?})", f.message)[1] for f in audit.findings]
    assert hints == ["{'experts.*.*.bias': 'sharded', 'experts.*.*.weight': 'sharded'}"] * 2


def test_copies_that_are_said_to_be_copies_have_no_hint(threads):
    for audit in threads(lambda rank: gg.audit_norm(experts(rank), groups={"*": "replicated"})):
        assert (audit.verdict, [f.kind for f in audit.findings]) == ("FAIL", ["copies"])
        assert "groups" not in audit.findings[0].message


@pytest.mark.parametrize("order", [1, -1])
def test_patterns_that_contradict_each_other_are_an_error(threads, order):
    groups = dict([("experts*", "sharded"), ("*.weight", "replicated")][::order])

    def audit(rank):
        with pytest.raises(
            InvalidValueError, match=r"^groups: .*'experts\*' is 'sharded'.*experts\.0\.0\.weight matches both"
        ) as e:
            gg.audit_norm(experts(rank), groups=groups)
        return str(e.value)

    assert "'*.weight' is 'replicated'" in threads(audit)[0]


CONTRADICTED = {
    "weights of parts": (
        {"column": "replicated"},
        "declared as copies, but their values are those of parts: weights differ",
    ),
    "weights of copies": ({"router": "sharded"}, "their values are those of copies: weights and gradients are equal"),
    "gradients of copies": (
        {"norm": "sharded"},
        "their values are those of copies: gradients are equal, and weights constant",
    ),
}


@pytest.mark.parametrize(("groups", "words"), CONTRADICTED.values(), ids=CONTRADICTED)
def test_a_claim_that_values_contradict_is_never_a_pass(threads, groups, words):
    """Each with the norm that would be right if the claim was."""

    def audit(rank):
        model = megatron(rank, 4, True)
        true = gg.audit_norm(model).true_norm
        return gg.audit_norm(model, lambda: megatron_norm(model, ""), groups=groups), true

    for found, true in threads(audit):
        assert found.verdict == "INCONCLUSIVE", str(found)
        assert [(f.kind, f.names) for f in found.findings] == [("claim", tuple(groups))]
        assert words in found.findings[0].message
        assert math.isnan(found.true_norm)
        assert true > 0


def test_parts_of_other_sizes_are_no_copies(threads):
    def audit(rank):
        model = torch.nn.Linear(3, 2 + rank)
        model.weight.grad, model.bias.grad = torch.randn(2 + rank, 3), torch.ones(2 + rank)
        return gg.audit_norm(model, groups={"*": "replicated"})

    for found in threads(audit):
        assert found.verdict == "INCONCLUSIVE"
        assert "processes hold " in found.findings[0].message


def test_a_layout_of_parts_that_are_copies_is_doubted(threads):
    def audit(rank, right):
        mesh = init_device_mesh("cpu", (4,))
        model = torch.nn.Linear(6, 4, bias=False)
        part, grad = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(rank if right else 0))
        model.weight = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))
        model.weight.grad = DTensor.from_local(grad, mesh, [Shard(0)])
        return gg.audit_norm(model)

    assert all(found.verdict == "PASS" for found in threads(lambda rank: audit(rank, True)))
    for found in threads(lambda rank: audit(rank, False)):
        assert [f.kind for f in found.findings] == ["claim"]


def reports(rank, model, kind):
    """Reports of one step: what `reported` alone tells."""
    true = gg.audit_norm(model).true_norm
    own = math.sqrt(sum(float(p.main_grad.double().square().sum()) for p in model.parameters()))
    wrong, one_of_two = (float(megatron_norm(model, f"{which} counted")) for which in ("replicated", "norm"))
    said = {"true": true, "own": own, "wrong": wrong, "one of two": one_of_two, "x4": 4 * true}
    return gg.audit_norm(model, reported=said[kind], accumulation=4)


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("true", []), ("own", ["local"]), ("wrong", ["reported", "factor"]),
        ("one of two", ["reported", "unfit"]),  # of a class of two one counts wrongly: no class explains it
        ("x4", ["reported", "factor", "factor"]),  # fact 18
    ],
)  # fmt: skip
def test_reports(threads, kind, kinds):
    for found in threads(lambda rank: reports(rank, megatron(rank, 4, True), kind)):
        assert [f.kind for f in found.findings] == kinds, str(found)
        if kind == "wrong":
            assert (found.findings[-1].names, found.findings[-1].factor) == (("norm", "router"), 4.0)
        if kind == "x4":
            message = found.findings[0].message
            assert re.search(r" 4 times .* as if multiplied by the 4 processes or the 4 micro-batches", message)


def scaled(model, factor):
    for p in model.parameters():
        p.grad = p.grad * factor


def reduced_and_scaled(model, factor):
    for p in model.parameters():
        placements = [Replicate() if at.is_partial() else at for at in p.grad.placements]
        p.grad = p.grad.redistribute(placements=placements) * factor


PARTIAL = {
    "kept": (lambda model, c: scaled(model, c), []),
    "added up": (lambda model, c: reduced_and_scaled(model, c), []),
    "added up and twice": (lambda model, c: reduced_and_scaled(model, c * c), ["coefficient"]),
    "never scaled": (lambda model, c: None, ["coefficient"]),
    "a part of each": (lambda model, c: sharded_anew(model, c), []),
    "a part of each, twice": (lambda model, c: sharded_anew(model, c * c), ["coefficient"]),
    "other sums": (lambda model, c: partial_anew(model, c), ["unread"]),
}


def sharded_anew(model, factor):
    for p in model.parameters():
        p.grad = p.grad.redistribute(placements=[Shard(0)]) * factor


def partial_anew(model, factor):
    for p in model.parameters():
        p.grad = DTensor.from_local(p.grad.to_local() * factor, p.grad.device_mesh, [Partial("avg")], run_check=False)


@pytest.mark.parametrize("case", PARTIAL)
def test_coefficients_of_partial_gradients_are_judged_or_refused(threads, case):
    change, kinds = PARTIAL[case]

    def audit(rank):
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Module()
        for i in range(3):
            whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
            summand = whole * (rank + 1)
            p = nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()], run_check=False))
            p.grad = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
            model.register_parameter(f"p{i}", p)

        def norm():
            found = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm()
            change(model, 0.1 / float(found) if found else 1.0)
            return found

        return gg.audit_norm(model, norm, max_norm=0.1)

    for found in threads(audit):
        assert sorted({f.kind for f in found.findings}) == kinds, str(found)


def replicas(rank, drifted, alike, constant):
    """An ordinary replica on each process, whose weight or gradient is another one on the last."""
    generator = torch.Generator().manual_seed(3)
    weight, grad = torch.randn(2, 40, generator=generator)
    other = torch.randn(2, 40, generator=torch.Generator().manual_seed(9))
    weight = torch.ones(40) if constant else weight
    model = nn.Module()
    model.w = nn.Parameter(weight + drifted * other[0] * (rank == 3))
    model.w.grad = grad if alike or rank < 3 else other[1]
    return model


REPLICAS = {
    "healthy": ((0.0, True, False), "PASS", []),
    "not added up": ((0.0, False, False), "FAIL", ["copies"]),
    "drifted": ((1e-3, True, False), "FAIL", ["drift"]),
    "drifted a little": ((5e-5, True, False), "FAIL", ["drift"]),
    "drifted, not added up": ((1e-3, False, False), "INCONCLUSIVE", ["unknown"]),
    "constant, not added up": ((0.0, False, True), "INCONCLUSIVE", ["unknown"]),
    "constant": ((0.0, True, True), "PASS", []),
    "experts of their own": ((3.0, False, False), "PASS", []),
}


@pytest.mark.parametrize("case", REPLICAS)
def test_replicas_that_are_not(threads, case):
    arguments, verdict, kinds = REPLICAS[case]
    for found in threads(lambda rank: gg.audit_norm(replicas(rank, *arguments))):
        assert (found.verdict, [f.kind for f in found.findings]) == (verdict, kinds), str(found)
        assert math.isnan(found.true_norm) == (verdict == "INCONCLUSIVE")
        assert "differ a little" in str(found) or case != "drifted, not added up"
        assert "of their norm; copies must be equal" in str(found) or kinds != ["drift"]


def own_norm_given(model):
    """Of what this process holds, as a helper that forgets the others would."""
    own = torch.stack([g.norm() for g in bits(model)]).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, own)


def in_two_lists(model):
    norm = nn.utils.get_total_norm(grads(model)).full_tensor()
    parameters = list(model.parameters())
    for part in (parameters[:1], parameters[1:]):
        nn.utils.clip_grads_with_norm_(part, 0.1, norm)


SCRIPTS = {
    ("ddp", "torch"): ("PASS", "3 audits of 1 clip"),
    ("ddp", "gradguard"): ("PASS", "reported"),
    ("fsdp2", "torch"): ("PASS", "2 processes"),
    ("fsdp2", "lists"): ("PASS", "3 audits of 1 clip"),
    ("fsdp2", "own"): ("FAIL", "ranks report different norms"),
    ("fsdp1", "torch"): ("FAIL", "each rank's norm covers only what it holds itself"),
    ("fsdp1", "fsdp1"): ("PASS", "2 processes"),
}


def run_of_a_script(kind, call):
    clips = {**NORMS, "own": own_norm_given, "lists": in_two_lists}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        model = wrapped("FULL_SHARD", False)[0] if kind == "fsdp1" else small(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    audit = ScriptAudit(living_modules, 3)
    with listening(audit), warnings.catch_warnings(), suppress(AuditDone):
        warnings.simplefilter("ignore")
        for step in range(5):
            optimizer.zero_grad()
            x, y = batch(step)
            part = slice(dist.get_rank(), None, dist.get_world_size())
            F.mse_loss(model(x[part]), y[part]).backward()
            clips[call](model)
            optimizer.step()
    return audit.outcome(), audit.done


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "call"), SCRIPTS)
def test_scripts_on_two_processes(pool, kind, call):
    for (verdict, text), done in pool(2).run(run_of_a_script, kind, call):
        assert (verdict, done) == (SCRIPTS[kind, call][0], True), text
        assert SCRIPTS[kind, call][1] in text
