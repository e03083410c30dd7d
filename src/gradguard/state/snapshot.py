"""`Snapshot`: a complete training state in memory, to which a run can go back repeatedly."""

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
    r"""Keep a copy of a training state in memory, and go back to it any number of times.

    It contains weights, buffers, the optimizer's state and the numbers of its groups, the generators of Python, NumPy,
    the CPU and the accelerators in use, and the objects in ``extra_state``. `take` replaces an earlier copy.

    **Guarantees.**

    * `restore` writes into the existing tensors: data pointers stay, so CUDA graphs, compiled code, FSDP2's buffers
      and other holders of a weight remain valid. Newer optimizer state is dropped, and missing state is created again;
      newer buffers stay.
    * The snapshot shares no memory with the run: training after `restore` does not change the snapshot. Going back
      twice and training on the same data gives the same bits.
    * All or nothing: a `take` that fails leaves no snapshot, a `restore` that is refused has written nothing.
    * `save` and `load` transfer it to another process, with the same bits; damaged or mixed files are refused.
    * For sharded weights (FSDP2, tensor parallelism) each process keeps its own part; nothing is sent.
    * There is no host sync on CUDA. Copies go to pinned memory in the order of the stream, so no later step can
      change a copy. (A GradScaler in ``extra_state`` reads one number.)

    **Memory.** As much as the weights, buffers and optimizer state of this process: 12 bytes a parameter for AdamW in
    float32. For a model on an accelerator it is host memory. `nbytes` is the size.

    **Edge cases.**

    ==========================================  ======================================================================
    case                                        what happens
    ==========================================  ======================================================================
    taken before the first step                 no optimizer state is kept, and `restore` removes the newer state
    the same, ``capturable=True``               refused at `restore` on an accelerator: a CUDA graph may use that state
    tied weights                                kept once
    frozen weights                              kept too: other code may write them (a teacher, a projection)
    gradients                                   set to 0 by `restore`, in place: they belong to other weights
    parameters or groups added or removed, or   an error at `restore`; take a new snapshot
    a module replaced
    buffers added since                         stay unchanged
    attributes of a custom optimizer            kept if they are numbers, text, tensors, arrays or containers of these,
                                                also in ``__slots__``; newer ones are removed. Its other objects are not
    a scheduler that is not in `extra_state`    an error at `take`: it would continue from outdated numbers
    StatefulDataLoader in `extra_state`         restored too, from its next ``iter()`` on; otherwise data continue
    LBFGS, SparseAdam, wrapped states           kept completely, including lists
    FSDP1, meta tensors, lazy layers            refused
    Python attributes of modules: ``training``  not kept, nor are hooks, nor whether a weight is frozen: the training
                                                loop sets them. ``get_extra_state`` is kept
    a generator, EMA, GradScaler, guard or      continues: `restore` changes only what `extra_state` lists, such as
    sampler that is not in `extra_state`        the `torch.Generator` that a module or sampler holds
    ==========================================  ======================================================================

    Args:
        model: The module that is trained, with or without a wrapper of DDP, FSDP2 or `torch.compile`.
        optimizer: Its optimizer; not a wrapper, but the optimizer inside.
        extra_state: Further parts of the state: schedulers, a GradScaler, modules (an averaged model), further
            optimizers, `torch.Generator`, clippers, any object with ``state_dict`` and ``load_state_dict``.

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
                    f"optimizer is {type(one).__name__}, which wraps another: pass the inner one, wrapper.optimizer."
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
        """Size in bytes of the tensors that it holds."""
        return self._copier.nbytes if self.taken else 0

    @torch.no_grad()
    def take(self) -> None:
        """Copy the present state; call it between two steps.

        Raises:
            InvalidValueError: If a scheduler of the optimizer is not in ``extra_state``.
            UnsupportedGradientError: If there are weights that cannot be copied, a container of an optimizer contains
                itself, or a CUDA graph is being captured.
        """
        driven = [part.driven for part in self._parts if isinstance(part, OtherState)]
        for state in self._optimizers:
            if has_scheduler(state.optimizer) and not any(one is state.optimizer for one in driven):
                raise InvalidValueError(
                    f"a learning-rate scheduler drives this {type(state.optimizer).__name__} and is not in the "
                    "snapshot: it would continue from a learning rate that was rewound. Pass it: "
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
        """Restore the state of the last `take`.

        Args:
            rewind_generators: Whether random numbers repeat. Pass False to continue with new data: data loaders draw
                the order of the next epoch from the same generators.
            rewind_schedule: Whether schedulers in ``extra_state``, and the numbers of the groups that they write
                (learning rate, momentum, weight decay), are restored as well.

        Raises:
            InvalidValueError: If nothing was taken, or parameters or groups were added or removed since.
            UnsupportedGradientError: If it would drop optimizer state that a CUDA graph may use.
        """
        if not self.taken:
            raise InvalidValueError("there is no snapshot to restore: call take() first, and let it finish.")
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
            InvalidValueError: If nothing was taken, or a tensor was added or removed since.
        """
        if not self.taken:
            raise InvalidValueError("there is no snapshot to return weights of: call take() first.")
        self.synchronize()
        return self._model.weights()

    def save(self, directory: str | os.PathLike[str], *, process_group: Any = None) -> None:
        """Write the copy to files of plain data, for `load`; all processes call it.

        Each process writes its own part: of sharded weights its shards, of replicated weights a copy. The directory
        appears when all files are written. If two jobs save into one directory, the second is refused. After an error
        nothing is left, so the same name can be used again.

        Args:
            directory: A new or empty one, which all processes reach by this path; that is checked at the end.
            process_group: The processes that train this model together; None for all.

        Raises:
            InvalidValueError: If nothing was taken, or the directory is not empty, or not the same for all processes.
            UnsupportedGradientError: If the state contains a value that cannot be encoded in a file, such as a lambda
                or an object of your own class.
            OSError: If the disk is full, for example.
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
        """Return the snapshot in files of `save`, for `restore`; the run itself is not changed yet.

        After `restore` a run in a new process continues bit by bit. No code in the files is run: they hold numbers,
        text and tensors. Their author decides the values, so load only weights that you would train on.

        Args:
            directory: The directory given to `save`.
            model: A model like the saved one, sharded over as many processes on the same mesh.
            optimizer: An optimizer like the saved one, which may be new, with its parameters in the same order, so
                not from a set.
            extra_state: Objects like the saved ones, in the same order.
            process_group: The processes that train this model together; None for all.

        Raises:
            InvalidValueError: On all processes, if there is no such snapshot, a file is damaged or of another save, or
                it is of another model, optimizer or number of processes. The optimizer's values are not checked.

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
        except Exception as problem:  # `check_save` raises it; the others would wait for this process
            error = problem
        check_save(Path(directory), number, error, process_group)
        snapshot.taken = True
        return snapshot

    def _packed(self, packer: Packer) -> dict[str, Any]:
        if not self.taken:
            raise InvalidValueError("there is no snapshot to save: call take() first.")
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
        """Let the host wait until all copies have arrived."""
        self._order.synchronize()

    def _prepare(self) -> None:
        for part in self._parts:
            part.prepare()
        self._order.begin(tensor.device for part in self._parts for tensor in part.tensors())
