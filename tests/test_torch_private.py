"""Private names of torch: one file has them, each function does what it says, and refuses where its names are gone."""

import ast
import importlib.util
import re
import sys
import textwrap
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from forked_python import run_python
from gradguard import torch_private
from gradguard.errors import UnsupportedVersionError

SOURCE = Path(__file__).parents[1] / "src/gradguard"
FILE = SOURCE / "torch_private.py"
FUNCTIONS = [
    n.name
    for n in ast.parse(FILE.read_text(encoding="utf-8")).body
    if isinstance(n, ast.FunctionDef) and n.name[0] != "_"
]


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def without(monkeypatch, *names):
    """The file as it is imported by a torch that lacks ``names``."""
    for name in names:
        holder, _, last = name.rpartition(".")
        try:
            monkeypatch.delattr(eval(holder), last)
        except (AttributeError, TypeError):  # of a class in C
            monkeypatch.setattr(holder, SimpleNamespace())
    spec = importlib.util.spec_from_file_location("lacking", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What asks for the names of each row. Torch loses those of a module or of a class; an object lacks them by itself.

OF_TORCH = {
    "is_alone": lambda file: file.is_alone(torch.zeros(8)),
    "are_operations_watched": lambda file: file.are_operations_watched(),
    "tree": lambda file: each_of_tree(file),
    "current_graph_task": lambda file: file.current_graph_task(),
    "call_before_backwards": lambda file: file.call_before_backwards(print),
    "call_after_backward": lambda file: file.call_after_backward(print),
    "gradients_of": lambda file: file.gradients_of([torch.ones(1)], [torch.ones(1)], [torch.ones(1)], False),
    "next_sequence_number": lambda file: file.next_sequence_number(),
    "each_operation": lambda file: file.each_operation(print),
    "saving_hooks": lambda file: file.saving_hooks(),
    "pop_function_mode": lambda file: pop_from_below(file),
    "decompositions": lambda file: file.decompositions(["silu"]),
    "global_hook_tables": lambda file: file.global_hook_tables(),
    "compiled_module": lambda file: file.is_compiled(nn.Linear(1, 1)),
    "is_within_compiled_code": lambda file: file.is_within_compiled_code(),
    "grads_of": lambda file: file.grads_of([torch.ones(1)]),
    "process_groups": lambda file: file.process_groups(),
    "default_store": lambda file: file.default_store(),
    "flattened_by_fsdp1": lambda file: file.flattened_by_fsdp1([None]),
}
OF_OBJECTS = {
    "stop_compiling": lambda bare: torch_private.stop_compiling(compiled_in_another_way()),
    "gradients_are_scaled": lambda bare: torch_private.gradients_are_scaled(bare, bare),
    "scaler_states_of": lambda bare: torch_private.scaler_states_of(bare),
    "overflows_of": lambda bare: torch_private.overflows_of(bare, bare),
    "loss_scale_of": lambda bare: torch_private.loss_scale_of(object.__new__(torch.amp.GradScaler)),
    "traced_scale_of": lambda bare: torch_private.traced_scale_of(bare),
    "traced_inputs": lambda bare: torch_private.traced_inputs(),
    "has_usual_shard_order": lambda bare: torch_private.has_usual_shard_order(SimpleNamespace(_spec=bare)),
    "device_types_of": lambda bare: torch_private.device_types_of(bare),
    "root_mesh_of": lambda bare: torch_private.root_mesh_of(bare),
    "is_silent_fsdp1": lambda bare: torch_private.is_silent_fsdp1(fsdp1()),
    "flat_part_of": lambda bare: torch_private.flat_part_of(fsdp1()),
    "meshes_of_fsdp2": lambda bare: torch_private.meshes_of_fsdp2([bare]),
    "let_fsdp2_only_cast": lambda bare: torch_private.let_fsdp2_only_cast([bare]),
}


def each_of_tree(file):
    for name in torch_private.NEEDS["tree"].names.split():
        with suppress(TypeError):  # of one that is there, and takes more
            getattr(file, name)(())


def pop_from_below(file, left=torch._C._len_torch_function_stack, pop=torch._C._pop_torch_function_stack):
    mode = TorchFunctionMode()
    for one in (mode, TorchFunctionMode()):
        one.__enter__()
    try:
        file.pop_function_mode(mode)
    finally:
        while left():
            pop()


def compiled_in_another_way():
    """A compiled module whose model stands under another name."""
    made = torch.compile(nn.Linear(1, 1), backend="eager")
    del made._modules["_orig_mod"]
    return made


def fsdp1(**attributes):
    """FSDP1 itself wants an accelerator; what we read of it is told by its class."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Wrapped(FullyShardedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = nn.Linear(1, 1)  # asked for every name that is not there

    wrapper = Wrapped()
    vars(wrapper).update(attributes)
    return wrapper


def lacking(row, name):
    """The words of a refusal where torch lacks ``name``."""
    need = torch_private.NEEDS[row]
    return (
        re.escape(f"{need.feature} needs {need.holder}.")
        + rf".*{re.escape(name)}.*, which torch {torch.__version__[:3]}"
    )


def test_every_row_has_a_test():
    assert OF_TORCH.keys() | OF_OBJECTS.keys() == torch_private.NEEDS.keys()


@pytest.mark.parametrize(
    ("row", "name"), [(row, name) for row in OF_TORCH for name in torch_private.NEEDS[row].names.split()]
)
def test_a_name_that_torch_lacks_is_refused_in_words(monkeypatch, row, name):
    for module in ("torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(module)
    need = torch_private.NEEDS[row]
    file = without(monkeypatch, f"{need.holder}.{name}")
    with pytest.raises(UnsupportedVersionError, match=lacking(row, name)) as refusal:
        OF_TORCH[row](file)
    assert need.instead in str(refusal.value)


@pytest.mark.parametrize("row", OF_OBJECTS)
def test_an_attribute_that_an_object_lacks_is_refused_in_words(monkeypatch, row):
    importlib.import_module("torch._dynamo.symbolic_convert")
    monkeypatch.setattr("torch._dynamo.symbolic_convert.tls", SimpleNamespace(current_tx=SimpleNamespace()))
    with pytest.raises(UnsupportedVersionError, match=lacking(row, "")) as refusal:
        OF_OBJECTS[row](SimpleNamespace())
    assert torch_private.NEEDS[row].instead in str(refusal.value)


def test_the_names_of_fsdp1_are_in_its_source():
    folder = Path(torch.__file__).parent / "distributed/fsdp"
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    names = [name for row in ("is_silent_fsdp1", "flat_part_of") for name in torch_private.NEEDS[row].names.split()]
    assert [name for name in [*names, "uses_sharded_strategy"] if not re.search(rf"\b{name}\b", source)] == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_has_a_test(function):
    text = Path(__file__).read_text(encoding="utf-8")
    assert f"def test_{function}" in text or f"torch_private.{function}" in text


# Arithmetic.


def test_foreach_norm():
    norms = torch_private.foreach_norm([torch.tensor([3.0, 4.0]), torch.tensor([[-2.0]])], 2, torch.float64)
    assert [(n.item(), n.dtype) for n in norms] == [(5.0, torch.float64), (2.0, torch.float64)]


def test_pop_function_mode():
    class Named(TorchFunctionMode):
        pass

    one, other = Named(), Named()
    with ExitStack() as stack:
        stack.enter_context(one)
        stack.enter_context(other)
        torch_private.pop_function_mode(one)
        assert torch.overrides._get_current_function_mode_stack() == [other]
        one.__enter__()


def test_saving_hooks():
    assert torch_private.saving_hooks() is None
    hooks = (lambda tensor: tensor.double(), lambda tensor: tensor.float())
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert torch_private.saving_hooks() == hooks
    assert torch_private.saving_hooks() is None


def test_foreach_mul_():
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    torch_private.foreach_mul_(tensors, torch.tensor(2.0))
    assert [t.tolist() for t in tensors] == [[2.0, 4.0], 6.0]


def test_foreach_copy_():
    tensors = [torch.zeros(2), torch.tensor(0, dtype=torch.int64)]
    torch_private.foreach_copy_(tensors, [torch.tensor([1.0, 2.0]), torch.tensor(3)])
    assert [t.tolist() for t in tensors] == [[1.0, 2.0], 3]


def test_foreach_clamp_():
    tensors = [torch.tensor([-5.0, 0.5, 5.0, float("nan")])]
    torch_private.foreach_clamp_(tensors, -1.0, 2.0)
    torch.testing.assert_close(tensors[0], torch.tensor([-1.0, 0.5, 2.0, float("nan")]), equal_nan=True)


def test_assert_async():
    torch_private.assert_async(torch.tensor(True), "a bound")
    with pytest.raises(RuntimeError, match="a bound"):
        torch_private.assert_async(torch.tensor(False), "a bound")


# Addresses, for the compiled kernels.


def test_exchange_table(monkeypatch):
    assert torch_private.exchange_table()
    assert without(monkeypatch, "torch.Tensor.__dlpack_c_exchange_api__").exchange_table() is None


def test_parallel_for(monkeypatch, tmp_path):
    assert torch_private.parallel_for()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert torch_private.parallel_for() is None


def test_are_operations_watched():
    assert not torch_private.are_operations_watched()
    with torch_private.each_operation(lambda call, args, kwargs: call(*args, **kwargs)):
        assert torch_private.are_operations_watched()


# Tensors and nested arguments.


def test_is_alone():
    tensor = torch.zeros(8)
    assert torch_private.is_alone(tensor)
    for held in (tensor[:2], tensor.numpy(), tensor.untyped_storage(), tensor.data):
        assert not torch_private.is_alone(tensor), held
    del held
    assert torch_private.is_alone(tensor)
    assert not torch_private.is_alone(tensor.share_memory_())


def test_version_of():
    tensor = torch.zeros(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1


def test_versions_of():
    tensors = [torch.zeros(2), torch.zeros(())]
    tensors[1].add_(1)
    assert torch_private.versions_of(tensors) == [0, 1]


def test_loader_has_begun():
    loader = torch.utils.data.DataLoader([1, 2])
    assert not torch_private.loader_has_begun(loader)
    loader._iterator = iter(loader)
    assert torch_private.loader_has_begun(loader)
    assert not torch_private.loader_has_begun(SimpleNamespace())


def test_a_view_has_a_base():
    tensor = torch.ones(2)
    assert torch_private.base_of(tensor[:1]) is tensor
    assert torch_private.base_of(tensor) is None


def test_hooks_of_tensor():
    weight = nn.Parameter(torch.ones(1))
    assert torch_private.hooks_of_tensor(weight) == []
    hooks = [lambda gradient: None, lambda parameter: None]
    weight.register_hook(hooks[0])
    weight.register_post_accumulate_grad_hook(hooks[1])
    assert torch_private.hooks_of_tensor(weight) == hooks


def test_sparse_values_and_indices():
    tensor = torch.sparse_coo_tensor([[1, 0, 1]], [1.0, 2.0, 3.0], check_invariants=True)  # not coalesced
    assert torch_private.sparse_values(tensor).tolist() == [1.0, 2.0, 3.0]
    assert torch_private.sparse_indices(tensor).tolist() == [[1, 0, 1]]


def test_nested_arguments():
    tree = ([1, {"a": 2}], 3)
    leaves, structure = torch_private.tree_flatten(tree)
    assert leaves == torch_private.tree_leaves(tree) == [1, 2, 3]
    assert torch_private.tree_unflatten(leaves, structure) == tree
    assert torch_private.tree_map(lambda x: x + 1, tree) == ([2, {"a": 3}], 4)
    assert [torch_private.keystr(path) for path, _ in torch_private.tree_flatten_with_path(tree)[0]][1] == "[0][1]['a']"


# Autograd.


def test_current_graph_task():
    tasks, x = [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = x * 2
        y.register_hook(lambda _: tasks.append(torch_private.current_graph_task()))
        y.sum().backward()
    assert torch_private.current_graph_task() == -1
    assert -1 not in tasks
    assert len(set(tasks)) == 2


def test_call_after_backward():
    order, x = [], torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("leaf"))
    y = x * 2
    y.register_hook(lambda _: torch_private.call_after_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["leaf", "end"]


def test_call_before_backwards():
    engine, told = torch.autograd._engine_run_backward, []
    y = (torch.ones(2, requires_grad=True) * 2).sum()
    first = torch_private.call_before_backwards(lambda one: told.append(("first", [*one.roots])))
    second = torch_private.call_before_backwards(lambda one: told.append(("second", [*one.roots])))
    y.backward(retain_graph=True)
    first()
    torch.autograd.backward([y], retain_graph=True)
    second()
    y.backward()
    assert [name for name, _ in told] == ["first", "second", "second"]
    assert all(root is y for _, [root] in told)
    assert torch.autograd._engine_run_backward is engine


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_call_before_backwards_of_a_compiled_step():
    told, weight = [], torch.ones(2, requires_grad=True)
    end = torch_private.call_before_backwards(lambda one: told.append((len(one.roots), torch.compiler.is_compiling())))
    step = torch.compile(lambda: (weight * 2).sum().backward(), backend="eager")
    step()
    step()
    end()
    step()
    assert told == [(1, False)] * 2


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter], ids=["the engine", "torch's own function"])
def test_gradients_of(kind):
    file, unused = torch_private, torch.ones(3, requires_grad=True)
    x = kind(torch.tensor([1.0, 2.0])).requires_grad_()
    outputs = [x * x, x.sum() * 3]
    for keep in (True, False):
        found, none = file.gradients_of(outputs, [x, unused], [torch.tensor([1.0, 10.0]), torch.tensor(2.0)], keep)
        assert found.tolist() == [8.0, 46.0]
        assert none is None
    with pytest.raises(RuntimeError, match="second time"):
        file.gradients_of(outputs, [x], [torch.ones(2), torch.tensor(1.0)], False)
    with pytest.raises(RuntimeError, match=r"Mismatch in shape: grad_output\[0\]"):
        file.gradients_of([x * x], [x], [torch.ones(())], False)


def test_next_sequence_number():
    x, number = torch.ones(2, requires_grad=True), torch_private.next_sequence_number()
    assert torch_private.sequence_number_of((x * 2).grad_fn) == number


def test_sequence_number_of():
    x = torch.ones(2, requires_grad=True)
    first, second = x * 2, x * 3
    numbers = [torch_private.sequence_number_of(t.grad_fn) for t in (first, second)]
    assert numbers[0] < numbers[1]


def test_input_metadata_of():
    node = torch.ones(2, 3, requires_grad=True).double().grad_fn
    (found,) = torch_private.input_metadata_of(node)
    assert (tuple(found.shape), found.dtype) == ((2, 3), torch.float64)


def test_saved_constant():
    x = torch.ones(2, requires_grad=True)
    assert torch_private.saved_constant(torch.add(x, x, alpha=3).grad_fn, "alpha") == 3
    assert torch_private.saved_constant(nn.functional.leaky_relu(x, 0.2).grad_fn, "negative_slope") == 0.2
    assert torch_private.saved_constant(SimpleNamespace(), "alpha") != torch_private.saved_constant(x, "alpha")  # NaN


def test_saved_settings():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_private.saved_settings(x.transpose(0, 1).grad_fn) == {"dim0": 0, "dim1": 1}
    found = torch_private.saved_settings(x.logsumexp(1, keepdim=True).grad_fn)
    assert found == {"dim": (1,), "keepdim": True}
    assert torch_private.saved_settings((x / 3).grad_fn) == {}  # a factor and a tensor
    assert torch_private.saved_settings(SimpleNamespace()) == {}


def test_saved_value():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert torch.equal(torch_private.saved_value(y.grad_fn, "result"), y)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        torch_private.saved_value(y.grad_fn, "result")
    with pytest.raises(AttributeError, match="_saved_dim"):
        torch_private.saved_value(y.grad_fn, "dim")


def test_recorded_stack():
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = x.exp()
    assert f'File "{__file__}", line ' in torch_private.recorded_stack(y.grad_fn)[-1]
    assert "y = x.exp()" in torch_private.recorded_stack(y.grad_fn)[-1]
    assert not torch_private.recorded_stack(x.exp().grad_fn)


def test_is_freed():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert not torch_private.is_freed(y.grad_fn)
    y.sum().backward()
    assert torch_private.is_freed(y.grad_fn)
    assert not torch_private.is_freed(SimpleNamespace())


# Modules.


def test_the_tables_of_hooks_are_told_by_name():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.register_step_pre_hook(called := lambda *_: None)
    tables = torch_private.hook_tables(optimizer)
    assert any(called in vars(optimizer)[name].values() for name in tables)
    assert not {"state", "param_groups", "defaults"} & set(tables)


def test_layer_slots():
    layer = torch.nn.Linear(1, 1)
    module = torch.nn.Sequential(layer)
    slots = torch_private.layer_slots(module)
    assert slots == {"0": layer}
    module.append(torch.nn.ReLU())
    assert list(slots) == ["0", "1"], "the dict that it reads"


def test_hook_tables_of():
    module = torch.nn.Linear(1, 1)
    tables = torch_private.hook_tables_of(module)
    hooks = [print, repr, str, len]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    module.register_full_backward_pre_hook(hooks[2])
    module.register_full_backward_hook(hooks[3])
    assert [list(table.values()) for table in tables] == [[hook] for hook in hooks]


def test_global_hook_tables():
    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(print),
        torch.nn.modules.module.register_module_forward_hook(repr),
    ]
    held = [list(table.values()) for table in torch_private.global_hook_tables()]
    for handle in handles:
        handle.remove()
    assert print in held[0]
    assert repr in held[1]


def test_parameters_in():
    layer = nn.Linear(2, 2)
    layer.register_parameter("scale", None)
    assert torch_private.parameters_in([layer, nn.ReLU(), layer]) == [layer.weight, layer.bias, None] * 2


def test_parameters_at():
    """In order, with None for what is not there."""
    layer = nn.Linear(2, 3, bias=False)
    places = [(layer, "weight"), (layer, "bias"), (layer, "gone"), (layer, "weight")]
    weight = layer.weight
    assert [one is weight for one in torch_private.parameters_at(places)] == [True, False, False, True]
    assert torch_private.parameters_at(places)[1:3] == [None, None]


@pytest.mark.parametrize("slots", [torch_private.parameter_slots, torch_private.buffer_slots])
def test_slots(slots):
    module = nn.BatchNorm1d(2)
    own = torch_private.parameter_slots(module), torch_private.buffer_slots(module)
    assert [list(d) for d in own] == [["weight", "bias"], ["running_mean", "running_var", "num_batches_tracked"]]
    name = next(iter(slots(module)))
    slots(module)[name] = None  # it is what the module reads
    assert getattr(module, name) is None


def test_call_slot():
    module = nn.Linear(1, 1)
    setattr(module, torch_private.call_slot(), lambda x: x + 1)
    assert module(torch.ones(1)).item() == 2


def test_each_operation():
    seen = []

    def call(operation, args, kwargs):
        seen.append(operation.name())
        return operation(*args, **kwargs)

    with torch_private.each_operation(call):
        assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert seen == ["aten::ones", "aten::add.Tensor"]


def test_arguments_of():
    found = torch_private.arguments_of(torch.ops.aten.dropout.default)
    assert [argument.name for argument in found] == ["input", "p", "train"]


@pytest.mark.parametrize(
    ("operation", "view", "changes"),
    [
        ("add.Tensor", False, False),
        ("view.default", True, False),
        ("add_.Tensor", True, True),
        ("split.Tensor", True, False),
    ],
)
def test_returns_a_view_and_changes_its_arguments(operation, view, changes):
    name, overload = operation.split(".")
    found = getattr(getattr(torch.ops.aten, name), overload)
    assert (torch_private.returns_a_view(found), torch_private.changes_its_arguments(found)) == (view, changes)


def test_decompositions():
    found = torch_private.decompositions(["silu", "no such operation"])
    assert [*found] == [torch.ops.aten.silu.default]
    x = torch.linspace(-1, 1, 5)
    assert torch.allclose(found[torch.ops.aten.silu.default](x), nn.functional.silu(x))


@pytest.mark.parametrize("way", ["torch.compile", "its own compile"])
def test_stop_compiling(way):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    if way == "torch.compile":
        part = torch.compile(layer, backend="eager")
    else:
        part = layer
        part.compile(backend="eager")
    graphs = []
    resume = torch_private.stop_compiling(part)
    hook = layer.register_forward_hook(lambda *_: graphs.append(torch.compiler.is_compiling()))
    assert torch.equal(part(x), layer(x))
    assert graphs
    assert not any(graphs)
    hook.remove()
    resume()
    assert torch_private.is_compiled(part)
    torch_private.stop_compiling(nn.Linear(1, 1))()


def test_hook_order():
    layer = nn.Linear(1, 1)
    assert torch_private.hook_order(layer) is None
    first, last = layer.register_forward_hook(print), layer.register_forward_pre_hook(print)
    assert torch_private.hook_order(layer) == (first.id, last.id)
    earlier, later = layer.register_forward_hook(print, prepend=True), layer.register_forward_pre_hook(print)
    assert torch_private.hook_order(layer) == (earlier.id, later.id)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torch_private.hook_order(layer) is None
    handle.remove()


def test_renew_recurrent_weights():
    layer, other = nn.GRU(1, 1), nn.Parameter(torch.zeros(3, 1))
    torch_private.parameter_slots(layer)["weight_ih_l0"] = other
    torch_private.renew_recurrent_weights(layer)
    assert layer._flat_weights[0] is other


def test_is_compiled():
    plain, inside = nn.Linear(1, 1), nn.Linear(1, 1)
    inside.compile(backend="eager")
    assert torch_private.is_compiled(torch.compile(plain, backend="eager"))
    assert torch_private.is_compiled(inside)
    assert not torch_private.is_compiled(plain)
    assert not torch_private.is_compiled(torch.ones(1))


KINDS = [
    ("batch_norms", [nn.BatchNorm2d(1), nn.LazyBatchNorm1d(), nn.SyncBatchNorm(1)]),
    ("instance_norms", [nn.InstanceNorm2d(1), nn.LazyInstanceNorm1d()]),
    ("dropouts", [nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]),
    ("transposed_convolutions", [nn.ConvTranspose3d(1, 1, 1), nn.LazyConvTranspose1d(1, 1)]),
]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(("row", "members"), KINDS, ids=lambda x: x if isinstance(x, str) else "")
def test_classes(row, members):
    classes = getattr(torch_private, row)
    foreign = type("Foreign", (classes(),), {})  # as other packages derive from a private class
    assert issubclass(foreign, classes())
    assert all(isinstance(m, classes()) for m in members)
    assert not isinstance(nn.Linear(1, 1), classes())


def test_wrapper_slots():
    model = torch.compile(nn.Linear(1, 1), backend="eager")
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} <= set(torch_private.wrapper_slots())


# Optimizers and GradScaler.


def test_capturable_warning_mark():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    source = Path(sys.modules["torch.optim.optimizer"].__file__).read_text(encoding="utf-8")
    assert torch_private.capturable_warning_mark() in source
    setattr(optimizer, torch_private.capturable_warning_mark(), True)
    optimizer.step()


def scaled_step(scaler):
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    return optimizer


def test_has_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not torch_private.has_scheduler(optimizer)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert torch_private.has_scheduler(optimizer)


def test_gradients_are_scaled(monkeypatch):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = scaled_step(scaler)
    assert torch_private.gradients_are_scaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert not torch_private.gradients_are_scaled(scaler, optimizer)
    file = without(monkeypatch, "torch.amp.grad_scaler.OptState")
    with pytest.raises(UnsupportedVersionError, match=r"Guard under GradScaler needs .*OptState"):
        file.gradients_are_scaled(scaler, optimizer)


def test_scaler_states_of():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = scaled_step(scaler)
    scaler.unscale_(optimizer)
    torch_private.scaler_states_of(scaler).clear()
    assert torch_private.gradients_are_scaled(scaler, optimizer)


def test_overflows_of():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = scaled_step(scaler)
    assert torch_private.overflows_of(scaler, optimizer) == []
    scaler.unscale_(optimizer)
    assert torch_private.overflows_of(scaler, optimizer) == [torch.tensor(0.0)]
    scaler.update()
    assert torch_private.overflows_of(scaler, optimizer) == []


def test_loss_scale_of():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.loss_scale_of(scaler) is None
    scaled_step(scaler)
    assert torch_private.loss_scale_of(scaler).item() == 8.0
    assert torch_private.loss_scale_of(SimpleNamespace()) is None


def test_traced_scale_of():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.traced_scale_of(scaler) == 8.0
    scaled_step(scaler)
    assert torch_private.traced_scale_of(scaler) is scaler._scale
    assert torch_private.traced_scale_of(torch.amp.GradScaler("cpu", enabled=False)) == 1.0


# The compiler.


@pytest.mark.slow
def test_constant_when_traced():
    traced = []

    @torch_private.constant_when_traced
    def constant():
        traced.append(torch.compiler.is_compiling())  # the compiler would say True
        return 3

    double = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert [double(torch.ones(1)).item() for _ in range(3)] == [3.0] * 3
    assert len(traced) == 1


@pytest.mark.slow
def test_never_compiled(monkeypatch):
    torch.compiler.reset()
    traced = []

    def inner(module, args):
        traced.append(torch.compiler.is_compiling())

    def hook(module, args):
        traced.append(torch.compiler.is_compiling())
        inner(module, args)

    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(torch_private.never_compiled(hook))
    compiled = torch.compile(layer, backend="eager")
    for _ in range(2):
        compiled(torch.ones(1, 2))
    assert traced == [False] * 4
    without(monkeypatch, "torch._C._dynamo").never_compiled(lambda: None)


def test_is_of_the_compiler():
    frame = lambda name: SimpleNamespace(f_globals={"__name__": name})  # noqa: E731
    assert torch_private.is_of_the_compiler(frame("torch._dynamo.eval_frame"))
    assert not torch_private.is_of_the_compiler(frame("torch.optim"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_is_within_compiled_code_and_traced_inputs():
    seen = []

    @torch_private.constant_when_traced
    def look():
        seen.append((torch_private.is_within_compiled_code(), torch_private.traced_inputs()))
        return True

    def broken(x):
        look()
        y = x * 2
        torch._dynamo.graph_break()
        z = y + 1
        look()
        return z

    torch.compiler.reset()
    given = torch.ones(2, requires_grad=True)
    torch.compile(broken, backend="eager")(given)
    assert not torch_private.is_within_compiled_code()
    assert torch_private.traced_inputs() == []
    (first, none), (second, held) = seen[0], seen[-1]
    assert (first, second, none) == (False, True, [])
    assert [(inside.grad_fn is not None, inside is not stand_in) for inside, stand_in in held] == [(True, True)]


# DTensor, process groups and FSDP1, with one process.


@pytest.mark.usefixtures("one_process")
def test_dtensors():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    plain, sharded = torch.ones(2), distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert torch_private.local_tensor_of(sharded).tolist() == [0, 1, 2, 3]
    assert [type(t) for t in torch_private.local_tensors([sharded, plain, None], [plain] * 3)] == [torch.Tensor] * 3
    spec = torch_private.spec_of(sharded)
    assert (spec.mesh, list(spec.placements)) == (mesh, [Shard(0)])
    assert torch_private.specs_of([sharded, plain, None]) == [spec, False, None]
    assert torch_private.specs_of([sharded])[0] is spec
    assert torch_private.layouts_of([sharded, plain]) == [spec, torch.float32]
    assert torch_private.local_tensors([sharded], [plain])[0] is torch_private.local_tensor_of(sharded)
    assert torch_private.has_usual_shard_order(sharded)
    assert torch_private.root_mesh_of(mesh["dp"]) == mesh
    usual = SimpleNamespace(placements=(), shard_order=(1,), compute_default_shard_order=lambda placements: (2,))
    assert not torch_private.has_usual_shard_order(SimpleNamespace(_spec=usual))
    assert isinstance(sharded, DTensor)


@pytest.mark.usefixtures("one_process")
def test_grads_of():
    from torch.distributed.tensor import Replicate, distribute_tensor

    class Telling(torch.Tensor):
        """A tensor whose gradient is not what torch keeps."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert function == torch.Tensor.grad.__get__
            return "told"

    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    sharded.grad = sharded.detach().clone()
    plain, without_any = torch.nn.Parameter(torch.ones(2)), torch.ones(3)
    plain.grad = torch.full((2,), 7.0)
    found = torch_private.grads_of([sharded, plain, without_any])
    assert [a is b for a, b in zip(found, [sharded.grad, plain.grad, None], strict=True)] == [True] * 3
    told = torch.Tensor._make_subclass(Telling, torch.ones(1))
    assert torch_private.grads_of([sharded, told])[1] == "told"
    assert torch_private.grads_of([]) == []


def test_process_groups(one_process):
    assert {g: list(ranks) for g, ranks in torch_private.process_groups().items()} == {one_process: [0]}
    assert "cpu" in torch_private.device_types_of(one_process)
    torch_private.default_store().set("key", "value")
    assert torch_private.default_store().get("key") == b"value"


@pytest.mark.usefixtures("one_process")
def test_meshes_of_fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(2, 1), mesh=mesh)
    assert torch_private.meshes_of_fsdp2([model]) == {id(p): mesh for p in model.parameters()}
    assert torch_private.meshes_of_fsdp2([]) == {}


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.usefixtures("one_process")
def test_let_fsdp2_only_cast(monkeypatch, casts):
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    model = fully_shard(nn.Linear(2, 1), mp_policy=MixedPrecisionPolicy(torch.bfloat16), reshard_after_forward=True)
    assert isinstance(model, FSDPModule)
    if not casts:  # as before torch 2.13
        monkeypatch.setattr(torch_private, "_casts_in_repeated_forwards", lambda state: False)
    model.unshard()
    whole = model.weight
    restore = torch_private.let_fsdp2_only_cast([model, model])
    output = model(torch.ones(3, 2))
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert whole.grad is not None
    assert model.weight is whole
    whole.grad = None
    restore()
    model.reshard()
    model(torch.ones(3, 2)).sum().backward()
    assert model.weight is not whole
    assert model.weight.grad is not None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_process")
def test_fsdp1(monkeypatch):
    wrapper, plain = fsdp1(), nn.Linear(1, 1)
    assert torch_private.is_fsdp1(wrapper)
    assert not torch_private.is_fsdp1(plain)
    assert not torch_private.is_silent_fsdp1(plain)
    assert torch_private.flat_part_of(plain) is None
    wrapper._handle, wrapper._sync_gradients = None, False
    assert torch_private.is_silent_fsdp1(wrapper)
    assert torch_private.flat_part_of(wrapper) is None
    flat = SimpleNamespace(_params=[plain.weight])
    wrapper.process_group, wrapper._handle = "group", SimpleNamespace(uses_sharded_strategy=True, flat_param=flat)
    flat._fqns, flat._shapes = ["weight", "bias"], [torch.Size([2, 3]), torch.Size([4])]
    flat._shard_param_infos = [(True, 1, 5, 2, 6), (False, None, None, None, None)]
    wrapper._handle._use_orig_params = False
    part = torch_private.flat_part_of(wrapper)
    assert part[:3] == ("group", True, (flat, plain.weight))
    assert [shard[:2] + shard[3:] for shard in part.shards] == [
        ("weight", (2, 3), 1, 5, 2),
        ("bias", (4,), 0, 0, 0),
    ]
    marked = SimpleNamespace(_fsdp_flattened=True)
    assert torch_private.flattened_by_fsdp1([plain.weight, marked, None]) == [False, True, False]
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert torch_private.flattened_by_fsdp1([plain.weight]) == [False]


# Importing, and the other files.


@pytest.mark.slow
def test_importing_needs_no_private_name():
    rows = [torch_private.NEEDS[row] for row in OF_TORCH]
    names = sorted({f"{row.holder}.{name}" for row in rows for name in row.names.split()})
    code = f"""
        import sys
        import gradguard.torch_private, torch, torch.distributed.fsdp, torch._dynamo  # all that we take
        lost = 0
        for path in {names}:
            holder, _, name = path.rpartition(".")
            try:
                kept = getattr(eval(holder), name)
                delattr(eval(holder), name)
            except (AttributeError, TypeError):  # of a class in C
                continue
            del sys.modules["gradguard.torch_private"]  # no other file has such a name, which has a test of its own
            import gradguard.torch_private
            setattr(eval(holder), name, kept)
            lost += 1
        print("lost", lost)
    """
    done = run_python("-c", textwrap.dedent(code), cwd=Path.cwd())
    assert int(done.stdout.removeprefix("lost ")) > 20


OTHERS = {
    "distributed/engines/zero.py": {"_get_norm_groups", "_zero_padding"},  # DeepSpeed's
    "integrations/keras.py": {
        "_accumulated_gradients", "_backend_apply_gradients", "_clip_gradients", "_iterations",
    },  # Keras' optimizer
    "integrations/lightning.py": {"_compiler_ctx"},  # Lightning's
    "integrations/transformers.py": {
        "_clip_grad_norm", "_get_grad_norm", "_load_optimizer_and_scheduler", "_save_optimizer_and_scheduler",
        "_original_forward",
    },  # the Trainer's, and Accelerate's
    "optimizer_hooks.py": {"_getframe"},  # Python's
    "errors.py": {"_getframe"},  # Python's
    "per_sample/layers/recurrent.py": {"_l", "_reverse"},  # in the names of parameters
    "cli/save_gradients.py": {"_exit"},  # of os, documented
    "parity/forked_runs.py": {"_exit"},
    "monitoring/observe/script.py": {"_threading_atexits", "_threads_queues"},  # Python's
}  # fmt: skip
"""Names with an underscore that are neither torch's nor gradguard's own, by file."""

PRIVATE_WITHOUT_UNDERSCORE = {"distributed_c10d", "flat_param", "OptState", "queue_callback", "shard_order", "Variable"}


def names_in(tree):
    """Attributes and imported names, and texts that look like an attribute; with whether self, cls or super has it."""
    documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield node.attr, own or (isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "gradguard":
            for part in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                yield part, False
        elif isinstance(node, ast.Import):
            for part in [part for alias in node.names for part in alias.name.split(".")]:
                yield part, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            parts = node.value.split(".")
            if (len(parts) == 1 or parts[0] == "torch") and all(part.isidentifier() for part in parts):
                for part in parts:
                    yield part, False


def is_private(name):
    return name in PRIVATE_WITHOUT_UNDERSCORE or (name.startswith("_") and not name.endswith("__") and name != "_")


def defined_in(tree):
    """Names of gradguard's own: functions, classes, variables, and attributes that its objects set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_no_other_file_has_a_private_name():
    trees = {
        f.relative_to(SOURCE).as_posix(): ast.parse(f.read_text(encoding="utf-8"))
        for f in SOURCE.rglob("*.py")
        if f != FILE
    }
    of_torch = {
        name for name, own in names_in(ast.parse(FILE.read_text(encoding="utf-8"))) if is_private(name) and not own
    }
    ours = {name for tree in trees.values() for name in defined_in(tree)} - of_torch
    ours.add("_replace")  # a public method of named tuples
    found = {
        f"{file}: {name}"
        for file, tree in trees.items()
        for name, own in names_in(tree)
        if is_private(name) and not own and name not in ours and not name.endswith("_by_gradguard")
        if name not in OTHERS.get(file, ())
    }
    assert found == set()
    used = {file: {name for name, _ in names_in(trees[file])} for file in OTHERS}
    assert {file: names - used[file] for file, names in OTHERS.items() if names - used[file]} == {}


def test_layouts_of_ordinary_tensors_are_their_dtypes():
    spread = SimpleNamespace(_spec="its spec")
    tensors = [torch.zeros(2), spread, torch.zeros(3, dtype=torch.float64)]
    assert torch_private.layouts_of(tensors) == [torch.float32, "its spec", torch.float64]


def test_saved_all():
    x = torch.rand(3, requires_grad=True)
    given, result = torch_private.saved_all(torch.hypot(x, x).grad_fn, ["self", "result"])
    assert torch.equal(given, x)
    assert torch.equal(result, torch.hypot(x, x))
    assert torch_private.saved_all((-x).grad_fn, ["self"]) is None


def test_saved_tensors_of():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = torch_private.saved_tensors_of((x * torch.tensor([3.0, 4.0])).grad_fn)
    assert any(torch.equal(one, torch.tensor([3.0, 4.0])) for one in found.values())
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.tolist(), torch.tensor):
        packed = (x * torch.tensor([3.0, 4.0])).grad_fn
    assert torch_private.saved_tensors_of(packed) == {}
