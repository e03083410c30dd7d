"""A whole training state in memory, to which a run can go back again and again."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.optimizer_hooks import optimizers_in
from gradguard.state.copies import Copier, Restorer, StreamOrder
from gradguard.state.generators import States, check_states, generator_states, restore_generators
from gradguard.state.saved_snapshot import Packer, Unpacker, check_save, compare_names, save_parts, saved_part
from gradguard.state.snapshot_parts import ModulePart, OptimizerPart, OtherState, SnapshotPart, has_state
from gradguard.torch_private import has_scheduler


class Snapshot:
    r"""Keep a copy of a training state in memory, and go back to it as often as wanted.

    Weights, buffers, the optimizer's state and the numbers of its groups, the generators of Python, NumPy, the CPU
    and the accelerators in use, and whatever ``extra_state`` lists. `take` replaces what an earlier one has kept.

    **Guarantees.**

    * `restore` writes into the tensors that are there: data pointers stay, so CUDA graphs, compiled code, FSDP2's
      buffers and other holders of a weight go on. Optimizer state that has come since is dropped, and what has gone is
      made anew; buffers that have come since stay.
    * Nothing is shared with the run: training on after `restore` does not change the snapshot. Going back twice and
      training on the same data gives the same bits.
    * All or nothing: a `take` that fails leaves no snapshot, a `restore` that is refused has written nothing.
    * `save` and `load` carry it to another process, with the same bits; damaged or mixed files are refused.
    * Of sharded weights (FSDP2, tensor parallelism) each process keeps its own part; nothing is sent.
    * The host does not wait for CUDA; copies go to pinned memory in the order of the stream, so no later step can
      tear one. (A GradScaler in ``extra_state`` reads one number.)

    **Memory.** As much as the weights, buffers and optimizer state of this process: 12 bytes a parameter for AdamW in
    float32. For a model on an accelerator it is on the host. `nbytes` is the number.

    **Edge cases.**

    ==========================================  ======================================================================
    case                                        what happens
    ==========================================  ======================================================================
    taken before the first step                 there is no optimizer state yet, and going back leaves none
    the same, ``capturable=True``               refused at `restore` on an accelerator: a CUDA graph may hold that state
    tied weights                                kept once
    frozen weights                              kept too: something else may write to them (a teacher, a projection)
    gradients                                   set to 0 by `restore`, in place: they were of other weights
    parameters or groups come or go, or a       an error at `restore`; take a new snapshot
    module is replaced
    buffers that have come since                stay as they are
    numbers that an optimizer of one's own      kept, as text, tensors, arrays and containers of these are, also those
    counts with                                 of ``__slots__``; what it has set since goes. Its other objects are not
    a scheduler that is not in `extra_state`    an error at `take`: it would go on from old numbers
    StatefulDataLoader in `extra_state`         goes back too, from its next ``iter()`` on; the data do not otherwise
    LBFGS, SparseAdam, wrapped states           kept as they are, lists and all
    FSDP1, meta tensors, lazy layers            refused
    Python attributes of modules: ``training``  not kept, nor are hooks, and whether a weight is frozen: the loop that
                                                goes on has set them. ``get_extra_state`` is kept
    a generator, EMA, GradScaler, guard or      goes on as it is: `restore` knows only what `extra_state` lists, such as
    sampler that is not in `extra_state`        the `torch.Generator` that a module or sampler holds
    ==========================================  ======================================================================

    Args:
        model: The module that is trained; wrapped by DDP, FSDP2 or `torch.compile` or not.
        optimizer: Its optimizer, of a wrapper the one inside.
        extra_state: Further parts of the state: schedulers, a GradScaler, modules (an averaged model), further
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

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, extra_state: Iterable[Any] = ()) -> None:
        extra_state = list(extra_state)
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"model is {type(model).__name__}: expected the torch.nn.Module that is trained.")
        for one in [optimizer, *(m for m in extra_state if isinstance(m, Optimizer))]:
            if not isinstance(one, Optimizer):
                raise InvalidTypeError(f"optimizer is {type(one).__name__}: expected a torch.optim.Optimizer.")
            if isinstance(getattr(one, "optimizer", None), Optimizer):
                raise InvalidTypeError(
                    f"optimizer is {type(one).__name__}, which wraps another: pass the one inside, wrapper.optimizer."
                )
        for one in extra_state:
            if not isinstance(one, torch.Generator) and not has_state(one):
                raise InvalidTypeError(
                    f"extra_state has a {type(one).__name__}: expected objects with state_dict() and "
                    "load_state_dict(), modules, optimizers or torch.Generator."
                )
        modules = [model, *(one for one in extra_state if isinstance(one, nn.Module))]
        optimizers = [optimizer, *(one for one in extra_state if isinstance(one, Optimizer))]
        others = [OtherState(one) for one in extra_state if not isinstance(one, nn.Module | Optimizer)]
        self._model = ModulePart(model)
        self._optimizers = [OptimizerPart(one, modules) for part in optimizers for one in optimizers_in(part)]
        self._parts: list[SnapshotPart] = [self._model, *map(ModulePart, modules[1:]), *self._optimizers]
        self._parts += sorted(others, key=lambda other: other.driven is not None)  # schedulers come last
        self._generators: States = {}
        self._copier = Copier()
        self._order = StreamOrder()
        self.taken = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds."""
        return self._copier.nbytes if self.taken else 0

    @torch.no_grad()
    def take(self) -> None:
        """Keep the state as it is now, between two steps.

        Raises:
            InvalidValueError: If a scheduler of the optimizer is not in ``extra_state``.
            UnsupportedGradientError: If there are weights that cannot be copied, a container of an optimizer contains
                itself, or a CUDA graph is being recorded.
        """
        driven = [part.driven for part in self._parts if isinstance(part, OtherState)]
        for state in self._optimizers:
            if has_scheduler(state.optimizer) and not any(one is state.optimizer for one in driven):
                raise InvalidValueError(
                    f"a learning-rate scheduler drives this {type(state.optimizer).__name__} and is not in the "
                    "snapshot: it would go on from a learning rate that has gone back. Pass it: "
                    "Snapshot(model, optimizer, extra_state=(scheduler,))."
                )
        self._prepare()
        self.taken = False
        self._copier.begin()
        for part in self._parts:
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
            rewind_schedule: Whether schedulers in ``extra_state``, and the numbers of the groups that they write
                (learning rate, momentum, weight decay), go back as well.

        Raises:
            InvalidValueError: If nothing was taken, or parameters or groups have come or gone since.
            UnsupportedGradientError: If optimizer state would have to go that a CUDA graph may use.
        """
        if not self.taken:
            raise InvalidValueError("there is no snapshot to restore: call take() first, and let it end.")
        self._prepare()
        for part in self._parts:
            part.check()
        restorer = Restorer()
        for part in self._parts:
            part.restore(restorer, rewind_schedule)
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
        return self._model.weights()

    def save(self, directory: str | os.PathLike[str], *, process_group: Any = None) -> None:
        """Write what was taken to files of plain data, for `load`; all processes call it.

        Each process writes its own part: of shards no more than it holds, of weights that all hold a copy for each.
        The directory appears when all is written: before, there is none. Of two jobs that save into one
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
        extra_state: Iterable[Any] = (),
        process_group: Any = None,
    ) -> Self:
        """Return the snapshot that `save` has written, for `restore`; the run itself is not changed yet.

        A run in a new process goes on from it to the bit. Nothing in the files is run: they hold numbers, text and
        tensors. Their author decides these, so load only weights that you would train on.

        Args:
            directory: As given to `save`.
            model: A model like the saved one, sharded over as many processes on the same mesh.
            optimizer: An optimizer like the saved one, which may be new, with its parameters in the same order, so
                not from a set.
            extra_state: Objects like the saved ones, in the same order.
            process_group: As for `save`.

        Raises:
            InvalidValueError: On all processes, if there is no such snapshot, a file is damaged or of another save, or
                it is of another model, optimizer or number of processes. The optimizer's state is taken as it is.

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
        snapshot, number, error = cls(model, optimizer, extra_state=extra_state), 0, None
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
        parts = [part.packed(packer) for part in self._parts]
        return {"kinds": [*(part.kind for part in self._parts)], "parts": parts, "generators": self._generators}

    @torch.no_grad()
    def _unpack(self, directory: Path, group: Any) -> int:
        self._prepare()
        with saved_part(directory, group) as (reader, number):
            content = reader.content()
            compare_names("what it holds", content["kinds"], (part.kind for part in self._parts))
            live = (tensor for part in self._parts for tensor in part.tensors())
            self._copier = unpacker = Unpacker(reader, live)
            for part, packed in zip(self._parts, content["parts"], strict=True):
                part.unpack(packed, unpacker)
            states = Restorer().restored(Unpacker(reader).copy(content["generators"]))
            check_states(states)
            self._generators = states
            return number

    def synchronize(self) -> None:
        """Wait until all copies have arrived on the host."""
        self._order.synchronize()

    def _prepare(self) -> None:
        for part in self._parts:
            part.prepare()
        self._order.begin(tensor.device for part in self._parts for tensor in part.tensors())
