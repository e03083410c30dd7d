"""The parts of a training state: a module, an optimizer, and any other object with a state.

Each part keeps one value of plain containers, made by `Copier.copy`; a file holds the same value.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.fully_sharded import is_fully_sharded
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.state.copies import Copier, Restorer
from gradguard.state.optimizer_copy import NOT_ATTRIBUTES, OptimizerCopy, attributes_of
from gradguard.state.plain_file import PlainError, is_stored
from gradguard.state.saved_snapshot import Packer, Unpacker, compare_layouts, compare_names
from gradguard.torch_private import buffer_slots, is_fsdp1


class SnapshotPart:
    """A part of the state that is copied and restored together.

    Attributes:
        kind: The part's kind. Parts of equal shape may differ in meaning, such as the states of Adam and AdamW.
    """

    kind: str
    _kept: Any = None

    def tensors(self) -> Iterable[Tensor]:
        """Return the tensors on whose devices the copies are ordered, see `StreamOrder`."""
        return ()

    def prepare(self) -> None:
        """Refuse parts that cannot be copied, before any copy is made."""

    def take(self, copier: Copier) -> None:
        """Copy the state."""
        raise NotImplementedError

    def packed(self, packer: Packer) -> Any:
        """Return the copy in the form that a file holds."""
        return packer.restored(self._kept)

    def unpack(self, packed: Any, unpacker: Unpacker) -> None:
        """Take the copy from the result of `packed`."""
        self._kept = unpacker.copy(packed)

    def check(self) -> None:
        """Refuse to restore if the run has changed its structure; called before anything is written."""

    def restore(self, restorer: Restorer, rewind_schedule: bool) -> None:
        """Write the copy back."""
        raise NotImplementedError


class ModulePart(SnapshotPart):
    """Weights, buffers and extra state of one module."""

    kind = "a module"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters: dict[str, Tensor] = {}
        self._slots: dict[str, tuple[dict[str, Tensor | None], str]] = {}  # each buffer's dict in its module, and name
        self._modules: dict[str, nn.Module] = {}
        self._buffers: dict[str, Tensor | None] = {}
        self._with_extra: dict[str, nn.Module] = {}

    def tensors(self) -> Iterator[Tensor]:
        """Yield weights and buffers."""
        yield from self._module.parameters()
        yield from self._module.buffers()

    def prepare(self) -> None:
        """Refuse FSDP1, and reshard FSDP2's layers."""
        for module in self._module.modules():
            if is_fsdp1(module):
                raise UnsupportedGradientError(
                    "FullyShardedDataParallel (FSDP1) moves its weights between flat buffers, so a copy may miss "
                    "them: use torch.distributed.fsdp.fully_shard(model), or save checkpoints with its own state_dict."
                )
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]  # a gathered layer has other parameters

    def take(self, copier: Copier) -> None:
        """Copy weights, buffers and extra state by their names."""
        self._look()
        content = {
            "parameters": self._parameters,
            "buffers": self._buffers,
            "extra": {name: module.get_extra_state() for name, module in self._with_extra.items()},
        }
        self._kept = copier.copy(content)

    def unpack(self, packed: Any, unpacker: Unpacker) -> None:
        """Take the copies from a file, if its module has the same structure."""
        self._look()
        compare_layouts("parameters", packed["parameters"], self._parameters)
        compare_names("buffers", sorted(packed["buffers"]), sorted(self._slots))
        if not all(one is None or is_stored(one) for one in packed["buffers"].values()):
            raise PlainError("a buffer is not a tensor")
        compare_names("modules with extra state", packed["extra"], self._with_extra)
        places = {"parameters": self._parameters, "buffers": self._slots, "extra": self._with_extra}
        super().unpack({part: {name: packed[part][name] for name in live} for part, live in places.items()}, unpacker)

    def _look(self) -> None:
        self._modules = dict(self._module.named_modules())
        self._parameters = dict(self._module.named_parameters())
        none = nn.Module.get_extra_state
        self._with_extra = {name: m for name, m in self._modules.items() if type(m).get_extra_state is not none}
        self._slots = {}
        for prefix, module in self._modules.items():
            slots = buffer_slots(module)
            for name in slots:
                self._slots[f"{prefix}.{name}".lstrip(".")] = slots, name
        self._buffers = self._live_buffers()

    def _live_buffers(self) -> dict[str, Any]:
        return {place: slots.get(name) for place, (slots, name) in self._slots.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return new tensors with the copied weights and buffers."""
        kept = self._kept
        places = [(self._parameters, kept["parameters"]), (self._live_buffers(), kept["buffers"])]
        copies = {id(one): copied[name] for live, copied in places for name, one in live.items()}
        live = {name: one for name, one in self._module.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
        if missing := [name for name, one in live.items() if copies.get(id(one)) is None]:
            raise InvalidValueError(f"{', '.join(missing[:5])} is no longer that of the snapshot: call take() again.")
        return {name: copies[id(one)].fresh() for name, one in live.items()}

    def check(self) -> None:
        """Refuse parameters that were added, removed or resized, and modules that were replaced."""
        then, now = self._parameters, dict(self._module.named_parameters())
        kept = self._kept["parameters"]
        names = [name for name in {**then, **now} if then.get(name) is not now.get(name)]
        names += [name for name, p in then.items() if p is now.get(name) and not kept[name].fits(p)]
        modules = dict(self._module.named_modules())
        names += [name for name, module in self._modules.items() if modules.get(name) is not module]
        if names:
            raise InvalidValueError(
                f"these are no longer those of the snapshot (added, removed, replaced or resized): "
                f"{', '.join(names[:5])}{' and more' if len(names) > 5 else ''}. Nothing was restored; call take() "
                "after such a change."
            )

    def restore(self, restorer: Restorer, rewind_schedule: bool) -> None:
        """Write weights and buffers into the existing tensors."""
        kept = self._kept
        for name, parameter in self._parameters.items():
            restorer.write(kept["parameters"][name], parameter)
        _zero_gradients(self._parameters.values())
        now, others = self._live_buffers(), {}
        for place, copied in kept["buffers"].items():
            if copied is not None and now[place] is self._buffers[place] and copied.fits(now[place]):
                restorer.write(copied, now[place])  # even if it shares memory with a weight or another buffer
            else:
                others[place] = copied
        for place, copied in others.items():
            slots, name = self._slots[place]
            slots[name] = restorer.restored(copied, now[place])
        for name, state in kept["extra"].items():
            self._with_extra[name].set_extra_state(restorer.restored(state))


class OptimizerPart(SnapshotPart):
    """The state of one optimizer, the numbers of its groups, and its plain attributes.

    Args:
        optimizer: The optimizer.
        modules: The modules that name its parameters.
    """

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module]) -> None:
        self.kind, self.optimizer, self._modules = type(optimizer).__qualname__, optimizer, modules
        self._copy = OptimizerCopy(optimizer)

    def tensors(self) -> Iterable[Tensor]:
        """Return the parameters."""
        return self._copy.named().values()

    def take(self, copier: Copier) -> None:
        """Copy the parameters, the numbers of the groups, the state and the attributes."""
        self._copy.take(copier)

    def packed(self, packer: Packer) -> Any:
        """Return the copy, with names in place of parameters, which a file does not hold."""
        content = packer.restored(self._copy.kept)
        places = {id(p): place for place, p in self._copy.parameters.items()}
        if any(isinstance(key, Tensor) and id(key) not in places for key in self._copy.keys):
            raise UnsupportedGradientError(
                "the optimizer has state of a tensor that is no longer in any of its groups."
            )
        keys = [places.get(id(key), key) for key in self._copy.keys]
        state = list(zip(keys, content["state"], strict=True))
        return {"names": self._names(), **content, "state": state}

    def unpack(self, packed: Any, unpacker: Unpacker) -> None:
        """Take the copy from a file, if its optimizer has the same structure."""
        live = self._copy.parameters = self._copy.named()
        compare_layouts(f"the parameters of {type(self.optimizer).__name__}", packed["parameters"], live)
        self._refuse_another_order(packed["names"])
        self._copy.keys = [live.get(key, key) for key, _ in packed["state"]]
        known, saved = attributes_of(self.optimizer), packed["attributes"]
        for name in saved.keys() - known.keys():  # a file may set plain attributes, but no method or hook table
            if name in NOT_ATTRIBUTES or hasattr(self.optimizer, name) or not name.isidentifier():
                raise PlainError(f"{type(self.optimizer).__name__}.{name!a:.40} is no plain attribute of an optimizer")
        content = {
            "parameters": packed["parameters"],
            "groups": packed["groups"],
            "state": [value for _, value in packed["state"]],
            "attributes": known | saved,
        }
        self._copy.kept = unpacker.copy(content)

    def _names(self) -> dict[str, str]:
        """Return the name in a module of the parameter at each position; empty if no module has it."""
        names = {id(p): name for module in reversed(self._modules) for name, p in module.named_parameters()}
        return {place: names.get(id(p), "") for place, p in self._copy.named().items()}

    def _refuse_another_order(self, names: dict[str, str]) -> None:
        """Refuse parameters in another order: state belongs to positions, and only names tell equal shapes apart."""
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
        """Refuse other parameters or groups, and a restore that would drop state in use by a CUDA graph."""
        then, now = self._copy.parameters, self._copy.named()
        kept, groups = self._copy.kept["groups"], self.optimizer.param_groups
        if len(kept) != len(groups) or then.keys() != now.keys() or any(then[place] is not now[place] for place in now):
            raise InvalidValueError(
                f"{type(self.optimizer).__name__} has other parameters or groups than when the snapshot was taken "
                f"({len(now)} in {len(groups)} groups, and {len(then)} in {len(kept)} then). Nothing was restored; "
                "call take() after add_param_group."
            )
        known = set(map(id, self._copy.keys))
        for group in groups:
            lost = [p for p in group["params"] if self.optimizer.state.get(p) and id(p) not in known]
            if group.get("capturable") and any(not p.is_cpu for p in lost):
                raise UnsupportedGradientError(
                    f"the snapshot was taken before {type(self.optimizer).__name__} had any state, and a CUDA graph "
                    "may use its present state (capturable=True). Nothing was restored; take the snapshot after the "
                    "first step."
                )

    def restore(self, restorer: Restorer, rewind_schedule: bool) -> None:
        """Write parameters, state, numbers of groups and attributes into the existing objects."""
        self._copy.restore(restorer, rewind_schedule)
        _zero_gradients(self._copy.parameters.values())


class OtherState(SnapshotPart):
    """An object with ``state_dict`` and ``load_state_dict``, or a generator.

    Attributes:
        driven: The optimizer that the object schedules, if it is a scheduler.
    """

    def __init__(self, thing: Any) -> None:
        self.kind, self.driven = type(thing).__qualname__, optimizer_of(thing)
        self._save, self._load = (
            (thing.get_state, thing.set_state)
            if isinstance(thing, torch.Generator)
            else (thing.state_dict, thing.load_state_dict)
        )

    def take(self, copier: Copier) -> None:
        """Copy its state."""
        self._kept = copier.copy(self._save())

    def restore(self, restorer: Restorer, rewind_schedule: bool = True) -> None:
        """Load the state as a new copy, which the object may keep."""
        if rewind_schedule or self.driven is None:
            self._load(Restorer().restored(self._kept))


def has_state(one: Any) -> bool:
    """Tell whether ``one`` has a state that can be saved and loaded."""
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def optimizer_of(thing: Any) -> Optimizer | None:
    """Return the optimizer of a scheduler; None for any other object."""
    inner = getattr(thing, "scheduler", thing)  # a trainer's wrapper has the scheduler inside
    optimizer = getattr(inner, "optimizer", None)
    is_scheduler = hasattr(inner, "get_last_lr") or isinstance(inner, torch.optim.lr_scheduler.LRScheduler)
    return optimizer if is_scheduler and isinstance(optimizer, Optimizer) else None


def _zero_gradients(parameters: Iterable[Tensor]) -> None:
    """Set gradients to 0, because they belong to other weights."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
