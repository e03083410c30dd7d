"""A whole training state in memory, to which a run can go back again and again."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.optimizer_hooks import optimizers_in
from gradguard.resilience.other_state import OtherState, optimizer_of
from gradguard.resilience.plain_values import PlainError, reference_to, with_references
from gradguard.resilience.saved_snapshot import (
    Packer,
    SavedPart,
    Unpacker,
    check_save,
    compare_layouts,
    compare_names,
    save_parts,
)
from gradguard.state.copies import Copier, Restorer, StreamOrder, TensorCopy, inner_tensors
from gradguard.state.generators import States, check_states, generator_states, restore_generators
from gradguard.state.optimizer_attributes import NOT_ATTRIBUTES, attributes_of
from gradguard.torch_private import buffer_slots, has_scheduler, is_fsdp1

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay", "initial_lr", "max_lr", "min_lr")
_SCHEDULED += ("base_momentum", "max_momentum")
"""Numbers of a group that schedulers write; what else it holds is the optimizer's own."""


class Snapshot:
    r"""Keep a copy of a training state in memory, and go back to it as often as wanted.

    Weights, buffers, the optimizer's state and the numbers of its groups, the generators of Python, NumPy, the CPU
    and the accelerators in use, and whatever ``more`` lists. `take` replaces what an earlier one has kept.

    **Guarantees.**

    * `restore` writes into the tensors that are there: data pointers stay, so CUDA graphs, compiled code, FSDP2's
      buffers and other holders of a weight go on. Only state that has come since is dropped, and what has gone is made
      anew.
    * Nothing is shared with the run: training on after `restore` does not change the snapshot. Going back twice and
      training on the same data gives the same bits.
    * All or nothing: a `take` that fails leaves no snapshot, a `restore` that is refused has written nothing.
    * `save` and `load` carry it to another process, with the same bits; damaged or mixed files are refused.
    * Of sharded weights (FSDP2, tensor parallelism) each process keeps its own part; nothing is sent.
    * The host does not wait for CUDA; copies go to pinned memory in the order of the stream, so no later step can
      tear one. (A GradScaler in ``more`` reads one number.)

    **Memory.** As much as the weights, buffers and optimizer state of this process: 12 bytes a parameter for AdamW in
    float32. For a model on an accelerator it is on the host. `nbytes` tells it.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    taken before the first step         there is no optimizer state yet, and going back leaves none
    the same, ``capturable=True``       refused at `restore` on an accelerator: a CUDA graph may hold that state
    tied weights                        kept once
    frozen weights                      kept too: something else may write to them (a teacher, a projection)
    gradients                           set to 0 by `restore`, in place: they were of other weights
    parameters or groups come or go     an error at `restore`; take a new snapshot
    a scheduler that is not in `more`   an error at `take`: it would go on from numbers that have gone back
    StatefulDataLoader in `more`        goes back too, from its next ``iter()`` on; the data do not otherwise
    LBFGS, SparseAdam, wrapped states   kept as they are, lists and all
    FSDP1, meta tensors, lazy layers    refused
    Python attributes of modules        not kept; ``get_extra_state`` is
    ==================================  ========================================================================

    Args:
        model: The module that is trained; wrapped by DDP, FSDP2 or `torch.compile` or not.
        optimizer: Its optimizer, of a wrapper the one inside.
        more: What else belongs to the state: schedulers, a GradScaler, modules (an averaged model), further
            optimizers, `torch.Generator`, clippers, anything with ``state_dict`` and ``load_state_dict``.

    Attributes:
        taken: Whether there is a snapshot to go back to.

    Raises:
        InvalidTypeError: If an argument is of another type.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> snapshot = gg.Snapshot(model, optimizer)
        >>> snapshot.take()
        >>> before = model.weight.clone()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> snapshot.restore()
        >>> torch.equal(model.weight, before), len(optimizer.state)
        (True, 0)
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, more: Iterable[Any] = ()) -> None:
        more = list(more)
        _check(model, optimizer, more)
        modules = [model, *(one for one in more if isinstance(one, nn.Module))]
        optimizers = [optimizer, *(one for one in more if isinstance(one, Optimizer))]
        others = [one for one in more if not isinstance(one, nn.Module | Optimizer)]
        self._optimizers = [_OptimizerState(one, modules) for part in optimizers for one in optimizers_in(part)]
        self._others = [OtherState(one) for one in others if optimizer_of(one) is None]
        self._schedulers = [OtherState(one) for one in others if optimizer_of(one) is not None]
        self._modules = [_ModuleState(module) for module in modules]
        self._generators: States = {}
        self._copier = Copier()
        self._order = StreamOrder()
        self.taken = False

    def __repr__(self) -> str:
        """Return what it holds."""
        return f"<Snapshot of {self.nbytes / 2**20:.1f} MiB>" if self.taken else "<Snapshot, not taken>"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return self._copier.nbytes if self.taken else 0

    @torch.no_grad()
    def take(self) -> None:
        """Keep the state as it is now, between two steps.

        Raises:
            InvalidValueError: If a scheduler of the optimizer is not in ``more``.
            UnsupportedGradientError: If there are weights that cannot be copied, or a CUDA graph is being recorded.
        """
        self._refuse_left_out_schedulers()
        self._prepare()
        self.taken = False
        self._copier.begin()
        for part in self._parts():
            part.take(self._copier)
        self._generators = generator_states(self._order.devices)
        self._copier.end()
        self._order.done()
        self.taken = True

    @torch.no_grad()
    def restore(self, *, rewind_generators: bool = True, rewind_schedule: bool = True) -> None:
        """Make the state what it was when it was taken.

        Args:
            rewind_generators: Whether random numbers come again. A run that goes on with new data does without: data
                loaders draw the order of the next epoch from the same generators.
            rewind_schedule: Whether schedulers in ``more``, and the numbers of the groups that they write (learning
                rate, momentum, weight decay), go back as well.

        Raises:
            InvalidValueError: If nothing was taken, or parameters or groups have come or gone since.
            UnsupportedGradientError: If optimizer state would have to go that a CUDA graph may use.
        """
        if not self.taken:
            raise InvalidValueError("there is no snapshot to restore: call take() first, and let it end.")
        self._prepare()
        for part in self._parts():
            part.check()
        restorer = Restorer()
        for module in self._modules:
            module.restore(restorer)
        for optimizer in self._optimizers:
            optimizer.restore(restorer, rewind_schedule)
        for other in [*self._others, *(self._schedulers if rewind_schedule else [])]:
            other.restore(restorer)
        if rewind_generators:
            restore_generators(self._generators)
        self._order.done()

    def weights(self) -> dict[str, Tensor]:
        """Return new tensors with the weights and buffers of the model, by the names of its ``state_dict``.

        Raises:
            InvalidValueError: If nothing was taken, or a tensor has come or gone since.
        """
        if not self.taken:
            raise InvalidValueError("there is no snapshot whose weights could be told: call take() first.")
        self.synchronize()
        return self._modules[0].weights()

    def save(self, directory: str | os.PathLike[str], *, process_group: Any = None) -> None:
        """Write what was taken to files of plain data, for `load`; all processes call it.

        Each process writes its own part: of shards no more than it holds, of weights that all hold a copy for each.
        The directory appears when all is written: whoever looks before finds none, of two jobs that save into one
        the second is refused, and after an error nothing is left, so that the same name serves again.

        Args:
            directory: A new or empty one, which all processes see by this path; it is looked at when all is written.
            process_group: The processes that train this model together; None for all.

        Raises:
            InvalidValueError: If nothing was taken, or the directory is not empty, or not one for all processes.
            UnsupportedGradientError: If the state holds what has no form in a file, such as a lambda or an object of a
                class of your own.
            OSError: If the disk is full, or the like.
        """
        save_parts(Path(directory), self._packed, process_group)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer,
        *,
        more: Iterable[Any] = (),
        process_group: Any = None,
    ) -> Self:
        """Return the snapshot that `save` has written, for `restore`; the run itself is not changed yet.

        A run in a new process goes on from it to the bit. Nothing in the files is run: they hold numbers, text and
        tensors. Whoever has written them decides these, so load only weights that you would train on.

        Args:
            directory: As given to `save`.
            model: The same model, sharded over as many processes on the same mesh.
            optimizer: The same optimizer, which may be new, with its parameters in the same order (not from a set).
            more: The same things in the same order.
            process_group: As for `save`.

        Raises:
            InvalidValueError: On all processes, if there is no such snapshot, a file is damaged or of another save, or
                it is of another model, optimizer or number of processes.

        Example:
            >>> import gradguard as gg, tempfile, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.AdamW(model.parameters())
            >>> snapshot, folder = gg.Snapshot(model, optimizer), tempfile.TemporaryDirectory()
            >>> snapshot.take()
            >>> snapshot.save(folder.name)
            >>> other = torch.nn.Linear(2, 1)
            >>> gg.Snapshot.load(folder.name, other, torch.optim.AdamW(other.parameters())).restore()
            >>> torch.equal(other.weight, model.weight)
            True
            >>> folder.cleanup()
        """
        snapshot, number, error = cls(model, optimizer, more=more), 0, None
        try:
            number = snapshot._unpack(Path(directory), process_group)
        except Exception as problem:  # or the others would wait for this process
            error = problem
        check_save(Path(directory), number, error, process_group)
        snapshot.taken = True
        return snapshot

    def _packed(self, packer: Packer) -> dict[str, Any]:
        if not self.taken:
            raise InvalidValueError("there is no snapshot that could be saved: call take() first.")
        self.synchronize()
        parts = [part.packed(packer) for part in self._parts()]
        return {"kinds": [*map(_kind_of, self._parts())], "parts": parts, "generators": self._generators}

    @torch.no_grad()
    def _unpack(self, directory: Path, group: Any) -> int:
        self._prepare()
        with SavedPart(directory, group) as saved:
            content = saved.content()
            compare_names("what it holds", content["kinds"], map(_kind_of, self._parts()))
            live = (tensor for part in self._parts() for tensor in part.tensors())
            self._copier = unpacker = Unpacker(live)
            for part, packed in zip(self._parts(), content["parts"], strict=True):
                part.unpack(packed, unpacker)
            unpacker.fill(saved)
            states = saved.values(content["generators"])
            check_states(states)
            self._generators = states
            return saved.number

    def synchronize(self) -> None:
        """Wait until all copies have arrived on the host."""
        self._order.synchronize()

    def _parts(self) -> Iterator[Any]:
        yield from self._modules
        yield from self._optimizers
        yield from self._others
        yield from self._schedulers

    def _prepare(self) -> None:
        for module in self._modules:
            module.prepare()
        of_modules = (tensor.device for module in self._modules for tensor in module.tensors())
        self._order.begin([*of_modules, *(p.device for state in self._optimizers for p in state.tensors())])

    def _refuse_left_out_schedulers(self) -> None:
        known = {id(optimizer_of(one.thing)) for one in self._schedulers}
        for state in self._optimizers:
            if has_scheduler(state.optimizer) and id(state.optimizer) not in known:
                raise InvalidValueError(
                    f"a learning-rate scheduler drives this {type(state.optimizer).__name__} and is not in the "
                    "snapshot: it would go on from a learning rate that has gone back. Pass it: "
                    "Snapshot(model, optimizer, more=(scheduler,))."
                )


class _ModuleState:
    """Weights, buffers and extra state of one module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: list[tuple[str, Tensor, TensorCopy]] = []
        self._buffers: list[tuple[str, nn.Module, str, TensorCopy | None]] = []
        self._views: dict[str, Tensor] = {}  # buffers that share memory with a weight, or with one another
        self._extra: list[tuple[nn.Module, Any]] = []

    def tensors(self) -> Iterator[Tensor]:
        yield from self._module.parameters()
        yield from self._module.buffers()

    def prepare(self) -> None:
        for module in self._module.modules():
            if is_fsdp1(module):
                raise UnsupportedGradientError(
                    "FullyShardedDataParallel (FSDP1) moves its weights between flat buffers, and a copy may miss "
                    "them: use torch.distributed.fsdp.fully_shard(model), or save checkpoints with its own state_dict."
                )
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]  # a layer that is gathered shows other parameters

    def take(self, copier: Copier) -> None:
        self._parameters = [(name, p, copier.tensor(p)) for name, p in self._module.named_parameters()]
        self._buffers = [(*place, copier.copy(buffer_slots(place[1])[place[2]])) for place in self._slots()]
        self._views = _sharing_memory(self._parameters, self._buffers)
        self._extra = [
            (module, copier.copy(module.get_extra_state())) for module in self._module.modules() if _has_extra(module)
        ]

    def _slots(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Name, module and name in it of each buffer."""
        for prefix, module in self._module.named_modules():
            for slot in buffer_slots(module):
                yield f"{prefix}.{slot}".lstrip("."), module, slot

    def packed(self, packer: Packer) -> dict[str, Any]:
        names = {id(module): name for name, module in self._module.named_modules()}
        return {
            "parameters": {name: packer.restored(kept) for name, _, kept in self._parameters},
            "buffers": {name: None if kept is None else packer.restored(kept) for name, _, _, kept in self._buffers},
            "extra": {names.get(id(module), ""): packer.restored(state) for module, state in self._extra},
        }

    def unpack(self, packed: dict[str, Any], unpacker: Unpacker) -> None:
        modules = dict(self._module.named_modules())
        compare_layouts("parameters", packed["parameters"], dict(self._module.named_parameters()))
        slots = {name: (module, slot) for name, module, slot in self._slots()}
        compare_names("buffers", sorted(packed["buffers"]), sorted(slots))
        compare_names(
            "modules with extra state", packed["extra"], [name for name, m in modules.items() if _has_extra(m)]
        )
        self._parameters = [(n, p, unpacker.copy(packed["parameters"][n])) for n, p in self._module.named_parameters()]
        self._buffers = [(name, *slots[name], unpacker.copy(one)) for name, one in packed["buffers"].items()]
        self._views = _sharing_memory(self._parameters, self._buffers)
        self._extra = [(modules[name], unpacker.copy(state)) for name, state in packed["extra"].items()]

    def weights(self) -> dict[str, Tensor]:
        kept = {id(p): copied for _, p, copied in self._parameters}
        kept |= {id(buffer_slots(m).get(slot)): copied for _, m, slot, copied in self._buffers if copied is not None}
        live = {name: one for name, one in self._module.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
        if missing := [name for name, one in live.items() if id(one) not in kept]:
            raise InvalidValueError(f"{', '.join(missing[:5])} is not that of the snapshot any more: take() anew.")
        return {name: kept[id(one)].fresh() for name, one in live.items()}

    def check(self) -> None:
        then = {name: p for name, p, _ in self._parameters}
        now = dict(self._module.named_parameters())
        names = [name for name in {**then, **now} if then.get(name) is not now.get(name)]
        names += [name for name, p, kept in self._parameters if p is now.get(name) and not kept.fits(p)]
        if names:
            raise InvalidValueError(
                f"these parameters are not those of the snapshot any more (added, removed, replaced or resized): "
                f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}. Nothing was restored; call take() "
                "after such a change."
            )

    def restore(self, restorer: Restorer) -> None:
        for _, parameter, kept in self._parameters:
            restorer.write(kept, parameter)
            if parameter.grad is not None:
                parameter.grad.zero_()
        for name, module, slot, kept in self._buffers:
            slots = buffer_slots(module)
            view = self._views.get(name)
            if kept is not None and view is not None and slots.get(slot) is view and kept.fits(view):
                restorer.write(kept, view)
            else:
                slots[slot] = None if kept is None else restorer.restored(kept, slots.get(slot))
        for module, state in self._extra:
            module.set_extra_state(restorer.restored(state))


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _sharing_memory(
    parameters: Iterable[tuple[str, Tensor, TensorCopy]],
    buffers: Iterable[tuple[str, nn.Module, str, TensorCopy | None]],
) -> dict[str, Tensor]:
    """Return the buffers, by name, whose memory another buffer or a weight has too, as a view or a flat buffer does."""
    live = {name: one for name, module, slot, _ in buffers if (one := buffer_slots(module).get(slot)) is not None}
    memory = Counter(filter(None, map(_memory, [*(p for _, p, _ in parameters), *live.values()])))
    return {name: one for name, one in live.items() if memory[_memory(one)] > 1}


def _memory(tensor: Tensor) -> int:
    """The address of what a plain tensor lies in; 0 of others, and of those without memory."""
    plain = tensor.layout is torch.strided and not inner_tensors(tensor)
    return tensor.untyped_storage().data_ptr() if plain else 0


class _OptimizerState:
    """The state of one optimizer, the numbers of its groups, and plain attributes that it counts with."""

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        self.optimizer, self._modules = optimizer, modules
        self._parameters: list[list[tuple[Tensor, TensorCopy]]] = []
        self._groups: list[Any] = []
        self._state: list[tuple[Any, Any]] = []
        self._attributes: Any = None

    def tensors(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def take(self, copier: Copier) -> None:
        groups = self.optimizer.param_groups
        self._parameters = [[(p, copier.tensor(p)) for p in group["params"]] for group in groups]
        self._groups = [copier.copy(_numbers(group)) for group in groups]
        self._state = [(key, copier.copy(value)) for key, value in self.optimizer.state.items()]
        self._attributes = copier.copy(attributes_of(self.optimizer))

    def packed(self, packer: Packer) -> dict[str, Any]:
        places = {id(p): name for name, p in self._named()}
        return {
            "names": self._names(),
            "parameters": {places[id(p)]: packer.restored(kept) for group in self._parameters for p, kept in group},
            "groups": [_without_references(packer.restored(kept)) for kept in self._groups],
            "state": [(_key(key, places), packer.restored(kept)) for key, kept in self._state],
            "attributes": packer.restored(self._attributes),
        }

    def unpack(self, packed: dict[str, Any], unpacker: Unpacker) -> None:
        live, groups = dict(self._named()), self.optimizer.param_groups
        compare_layouts(f"the parameters of {type(self.optimizer).__name__}", packed["parameters"], live)
        self._refuse_another_order(packed["names"])
        kept = {name: unpacker.copy(one) for name, one in packed["parameters"].items()}
        self._parameters = [[(p, kept[_place(i, k)]) for k, p in enumerate(g["params"])] for i, g in enumerate(groups)]
        self._groups = [
            unpacker.copy(with_references(numbers, _numbers(group), f"what param_groups[{i}] holds"))
            for i, (group, numbers) in enumerate(zip(groups, packed["groups"], strict=True))
        ]
        self._state = [(live.get(key, key), unpacker.copy(state)) for key, state in packed["state"]]
        self._attributes = unpacker.copy(_checked_attributes(packed["attributes"], self.optimizer))

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for i, group in enumerate(self.optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                yield _place(i, k), p

    def _names(self) -> dict[str, str]:
        """The name in a module of the parameter at each place; empty where none has it."""
        names = {id(p): name for module in reversed(self._modules) for name, p in module.named_parameters()}
        return {place: names.get(id(p), "") for place, p in self._named()}

    def _refuse_another_order(self, names: dict[str, str]) -> None:
        """State belongs to places, as in ``load_state_dict``: of parameters of one shape only names tell them apart."""
        moved = [(place, then, now) for place, now in self._names().items() if (then := names[place]) != now]
        if moved:
            place, then, now = moved[0]
            raise InvalidValueError(
                f"the snapshot is of another run: {type(self.optimizer).__name__} has its parameters in another order "
                f"({place} was {then or 'of no module'}, here {now or 'of no module'}; {len(moved)} of {len(names)} "
                "in all). Nothing was changed. List them in the same order in each run, as model.named_parameters() "
                "does and a set does not."
            )

    def check(self) -> None:
        now = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        if now != [[id(p) for p, _ in group] for group in self._parameters]:
            raise InvalidValueError(
                f"{type(self.optimizer).__name__} has other parameters or groups than when the snapshot was taken "
                f"({sum(map(len, now))} in {len(now)} groups, and {sum(map(len, self._parameters))} in "
                f"{len(self._parameters)} then). Nothing was restored; call take() after add_param_group."
            )
        self._refuse_to_drop_captured_state()

    def _refuse_to_drop_captured_state(self) -> None:
        kept = {id(key) for key, _ in self._state}
        for group in self.optimizer.param_groups:
            lost = [p for p in group["params"] if self.optimizer.state.get(p) and id(p) not in kept]
            if group.get("capturable") and any(not p.is_cpu for p in lost):
                raise UnsupportedGradientError(
                    f"the snapshot was taken before {type(self.optimizer).__name__} had any state, and a CUDA graph "
                    "may use the state that it has now (capturable=True). Nothing was restored; take the snapshot "
                    "after the first step."
                )

    def restore(self, restorer: Restorer, rewind_schedule: bool) -> None:
        for parameter, kept in (pair for group in self._parameters for pair in group):
            restorer.write(kept, parameter)
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._restore_state(restorer)
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=True):
            _restore_group(group, kept, restorer, rewind_schedule)
        for name, value in restorer.restored(self._attributes, attributes_of(self.optimizer)).items():
            setattr(self.optimizer, name, value)

    def _restore_state(self, restorer: Restorer) -> None:
        state = self.optimizer.state
        contents = {key: restorer.restored(kept, state.get(key)) for key, kept in self._state}
        state.clear()
        state.update(contents)


def _key(key: Any, places: dict[int, str]) -> Any:
    if isinstance(key, Tensor) and id(key) not in places:
        raise UnsupportedGradientError("the optimizer has state of a tensor that is in none of its groups any more.")
    return places.get(id(key), key)


def _place(group: int, parameter: int) -> str:
    return f"group {group}, parameter {parameter}"


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_group(group: dict[str, Any], kept: Any, restorer: Restorer, rewind_schedule: bool) -> None:
    stays = {"params", *(() if rewind_schedule else _SCHEDULED)}
    for key in [key for key in group if key not in kept.entries and key not in (*stays, "initial_lr")]:
        del group[key]
    for key in kept.entries.keys() - stays:
        group[key] = restorer.restored(kept.entries[key], group.get(key))


def _checked_attributes(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return attributes that may be set: numbers of this optimizer, and none of its methods or tables."""
    known = attributes_of(optimizer)
    for name in saved:
        if name not in known and (name in NOT_ATTRIBUTES or hasattr(optimizer, name) or not name.isidentifier()):
            raise PlainError(f"{type(optimizer).__name__}.{name!a:.40} is no number of an optimizer")
    return saved


def _without_references(group: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group with the name of each function in its place: a file holds no function."""
    return {key: (callable(value) and reference_to(value)) or value for key, value in group.items()}


def _kind_of(part: Any) -> str:
    """Return what a part is of: two of one shape may be of different meaning, as the state of Adam and AdamW."""
    if isinstance(part, _ModuleState):
        return "a module"
    return type(part.optimizer if isinstance(part, _OptimizerState) else part.thing).__qualname__


def _check(model: object, optimizer: object, more: Sequence[Any]) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained.")
    for one in [optimizer, *(m for m in more if isinstance(m, Optimizer))]:
        if not isinstance(one, Optimizer):
            raise InvalidTypeError(f"optimizer is {type(one).__name__}: expected a torch.optim.Optimizer.")
        if isinstance(getattr(one, "optimizer", None), Optimizer):
            raise InvalidTypeError(
                f"optimizer is {type(one).__name__}, which wraps another: pass the one inside, wrapper.optimizer."
            )
    for one in more:
        if not isinstance(one, torch.Generator) and not (
            hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        ):
            raise InvalidTypeError(
                f"more has a {type(one).__name__}: expected objects with state_dict() and load_state_dict(), modules, "
                "optimizers or torch.Generator."
            )
