r"""Recurrent layers and cells, unrolled over time a second time.

With :math:`a_t = W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}` before the gates, one backward through the unrolled
recurrence gives every :math:`\partial / \partial a_t`, and both weights become weights of linear maps:
:math:`g_i = \sum_t \partial a_{it} \otimes x_{it}` and :math:`\sum_t \partial a_{it} \otimes h_{i,t-1}`.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contribution, Materialized, Outer, wide
from gradguard.per_sample.layers.call import (
    BatchAxis,
    LayerCall,
    by_sample,
    layer_name,
    replaying,
    require_same,
    sample_axis,
    zeros,
)

State = tuple[Tensor, ...]
"""``(h,)``, or ``(h, c)`` of an LSTM, each ``[rows, H]``."""


class _Arguments(NamedTuple):
    """The arguments of every recurrent forward, in its order."""

    input: Any
    hx: Any = None


class _Pass(ABC):
    """One layer in one direction, and what its parameters' gradients need.

    Args:
        call: The call.
        suffix: The end of its parameters' names, such as ``"_l1_reverse"``.
    """

    def __init__(self, call: LayerCall, suffix: str) -> None:
        self.module, self.suffix = call.module, suffix
        names = {f"{kind}{suffix}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}
        self.wanted = frozenset(names & call.wanted)
        self.weight_ih, self.weight_hh = self._parameter("weight_ih"), self._parameter("weight_hh")
        self.bias_ih, self.bias_hh = self._parameter("bias_ih"), self._parameter("bias_hh")
        self.weight_hr = self._parameter("weight_hr")
        self.sequence = self.before = torch.empty(0)
        self.previous: list[Tensor] = []
        self.unprojected: list[Tensor] = []
        self.projected: list[Tensor] = []

    def _parameter(self, kind: str) -> Any:
        parameter = getattr(self.module, kind + self.suffix, None)
        return None if parameter is None else parameter.detach()

    def run(self, sequence: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs ``[T, rows, H]`` and the last state."""
        self.sequence = sequence.detach()
        # The input's share for all times is one product. Each a_t is a sum with one row of it, so the gradient of
        # this tensor is the gradient of all a_t.
        before = F.linear(sequence, self.weight_ih, self._input_bias())
        self.before = before if before.requires_grad else before.requires_grad_(bool(self.wanted))
        outputs: list[Tensor] = []
        steps, reverse = self.before.unbind(0), self.suffix.endswith("_reverse")
        for inputs in reversed(steps) if reverse else steps:
            self.previous.append(state[0].detach())
            state = self._step(inputs, state)
            outputs.append(state[0])
        if reverse:
            for history in self._histories():
                history.reverse()
            outputs.reverse()
        return torch.stack(outputs), state

    def _histories(self) -> list[list[Tensor]]:
        """Lists with one entry for each step, turned round after a pass against time."""
        return [self.previous, self.unprojected, self.projected]

    def _input_bias(self) -> Tensor | None:
        return None if self.bias_ih is None else self.bias_ih + self.bias_hh

    @abstractmethod
    def _step(self, inputs: Tensor, state: State) -> State:
        """Advance by one time."""

    def _hidden_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient of ``weight_hh @ h + bias_hh`` from that of ``weight_ih @ x + bias_ih``."""
        return gradient

    def targets(self) -> list[Tensor]:
        """Return the tensors whose gradients `contributions` needs."""
        if not self.wanted:
            return []
        return [self.before, *self.projected] if f"weight_hr{self.suffix}" in self.wanted else [self.before]

    def contributions(self, gradients: list[Tensor], axis: BatchAxis, batch_size: int) -> dict[str, Contribution]:
        """Return those of the wanted parameters from the gradients of `targets`."""
        contributions: dict[str, Contribution] = {}
        sides = (
            ("ih", gradients[0], self.sequence),
            ("hh", self._hidden_gradient(gradients[0]), torch.stack(self.previous)),
        )
        for side, gradient, right in sides:
            left = by_sample(gradient, axis, batch_size)
            if (name := f"weight_{side}{self.suffix}") in self.wanted:
                contributions[name] = Outer(left, by_sample(right, axis, batch_size))
            if (name := f"bias_{side}{self.suffix}") in self.wanted:
                contributions[name] = Materialized(wide(left).sum(1))
        if (name := f"weight_hr{self.suffix}") in self.wanted:
            left, right = torch.stack(gradients[1:]), torch.stack(self.unprojected)
            contributions[name] = Outer(by_sample(left, axis, batch_size), by_sample(right, axis, batch_size))
        return contributions


class _PlainPass(_Pass):
    def _step(self, inputs: Tensor, state: State) -> State:
        before = torch.addmm(inputs, state[0], self.weight_hh.mT)
        return (torch.tanh(before) if self.module.nonlinearity == "tanh" else torch.relu(before),)


class _LstmPass(_Pass):
    def _step(self, inputs: Tensor, state: State) -> State:
        input_gate, forget_gate, new, output_gate = torch.addmm(inputs, state[0], self.weight_hh.mT).chunk(4, 1)
        cell = torch.sigmoid(forget_gate) * state[1] + torch.sigmoid(input_gate) * torch.tanh(new)
        hidden = torch.sigmoid(output_gate) * torch.tanh(cell)
        if self.weight_hr is not None:
            self.unprojected.append(hidden.detach())
            hidden = hidden @ self.weight_hr.mT
            self.projected.append(hidden)
        return hidden, cell


class _GruPass(_Pass):
    def __init__(self, call: LayerCall, suffix: str) -> None:
        super().__init__(call, suffix)
        self.resets: list[Tensor] = []

    def _histories(self) -> list[list[Tensor]]:
        return [*super()._histories(), self.resets]

    def _input_bias(self) -> Tensor | None:
        return self.bias_ih

    def _step(self, inputs: Tensor, state: State) -> State:
        hidden = F.linear(state[0], self.weight_hh, self.bias_hh)
        size = hidden.shape[1] // 3
        reset, update = torch.sigmoid(inputs[:, : 2 * size] + hidden[:, : 2 * size]).chunk(2, 1)
        new = torch.tanh(inputs[:, 2 * size :] + reset * hidden[:, 2 * size :])
        self.resets.append(reset.detach())
        return (torch.lerp(new, state[0], update),)

    def _hidden_gradient(self, gradient: Tensor) -> Tensor:
        """The last third of ``weight_hh @ h + bias_hh`` is multiplied by the reset gate before it is added."""
        size = gradient.shape[2] // 3
        return torch.cat([gradient[..., : 2 * size], gradient[..., 2 * size :] * torch.stack(self.resets)], 2)


_PASSES: dict[str, type[_Pass]] = {
    "RNN_TANH": _PlainPass,
    "RNN_RELU": _PlainPass,
    "LSTM": _LstmPass,
    "GRU": _GruPass,
}
_CELLS: tuple[tuple[type[nn.RNNCellBase], type[_Pass]], ...] = (
    (nn.LSTMCell, _LstmPass),
    (nn.GRUCell, _GruPass),
    (nn.RNNCell, _PlainPass),
)


def recurrent(call: LayerCall) -> dict[str, Contribution]:
    """Return the contribution to each wanted parameter of a ``torch.nn.LSTM``, ``torch.nn.GRU`` or ``torch.nn.RNN``.

    Raises:
        UnsupportedGradientError: If the input is packed or unbatched, samples lie in another dimension than the
            layer's batch, or the forward could not be repeated.
    """
    module = call.module
    assert isinstance(module, nn.RNNBase)
    if not call.batch_size:
        return zeros(call)
    batch_dim = 0 if module.batch_first else 1
    arguments = _Arguments(*call.args, **call.kwargs)
    _require_batched(call, arguments.input, 3)
    given = _state(arguments.hx)
    dimensions = {"input": (arguments.input, batch_dim)} | {
        name: (tensor, 1) for name, tensor in zip(("h_0", "c_0"), given, strict=False)
    }
    axis = sample_axis(call, dimensions, f"batch_first={module.batch_first}")
    sequence = arguments.input.transpose(0, 1) if module.batch_first else arguments.input
    weight = module.get_parameter("weight_hh_l0")
    dropout = module.dropout if module.training and module.num_layers > 1 else 0.0
    with replaying(call, weight.device, random=dropout > 0):
        outputs, passes = _run_layers(call, module, sequence.to(weight.dtype), given, dropout)
        if module.batch_first:
            outputs[0] = outputs[0].transpose(0, 1)
        require_same(call, outputs, [batch_dim, *[1] * (len(outputs) - 1)])
        return _contributions(call, outputs, passes, axis)


def _run_layers(
    call: LayerCall, module: nn.RNNBase, sequence: Tensor, given: State, dropout: float
) -> tuple[list[Tensor], list[_Pass]]:
    """What the layer returns, with time first, and the passes in the order of ``h_n``."""
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    passes: list[_Pass] = []
    last: list[State] = []
    for layer in range(module.num_layers):
        if dropout and layer:
            sequence = F.dropout(sequence, dropout)
        directions: list[Tensor] = []
        for suffix in suffixes:
            current = _PASSES[module.mode](call, f"_l{layer}{suffix}")
            start = tuple(tensor[len(passes)].to(sequence.dtype) for tensor in given)
            output, state = current.run(sequence, start or _zero_state(current, sequence))
            passes.append(current)
            directions.append(output)
            last.append(state)
        sequence = torch.cat(directions, 2) if len(directions) > 1 else directions[0]
    return [sequence, *(torch.stack(states) for states in zip(*last, strict=True))], passes


def recurrent_cell(call: LayerCall) -> dict[str, Contribution]:
    """Return the contribution to each wanted parameter of a ``torch.nn.LSTMCell``, ``GRUCell`` or ``RNNCell``.

    Raises:
        UnsupportedGradientError: If the input is unbatched, samples lie in another dimension than the first, or the
            forward could not be repeated.
    """
    if not call.batch_size:
        return zeros(call)
    arguments = _Arguments(*call.args, **call.kwargs)
    _require_batched(call, arguments.input, 2)
    given = _state(arguments.hx)
    dimensions = {name: (x, 0) for name, x in zip(("input", "h", "c"), (arguments.input, *given), strict=False)}
    axis = sample_axis(call, dimensions, "a cell")
    kind = next(kind for cell, kind in _CELLS if isinstance(call.module, cell))
    current = kind(call, "")
    with replaying(call, current.weight_hh.device, random=False):
        sequence = arguments.input.unsqueeze(0).to(current.weight_hh.dtype)
        start = tuple(tensor.to(sequence.dtype) for tensor in given)
        outputs = list(current.run(sequence, start or _zero_state(current, sequence))[1])
        require_same(call, outputs, [0] * len(outputs))
        return _contributions(call, outputs, [current], axis)


def _contributions(
    call: LayerCall, outputs: list[Tensor], passes: list[_Pass], axis: BatchAxis
) -> dict[str, Contribution]:
    """One backward through all passes at once, then each pass's parameters."""
    reached = [(out, grad.to(out.dtype)) for out, grad in zip(outputs, call.grads, strict=True) if grad is not None]
    targets = [current.targets() for current in passes]
    flat = [target for group in targets for target in group]
    if not reached or not flat:
        return zeros(call)
    tensors, grads = zip(*reached, strict=True)
    gradients = iter(torch.autograd.grad(tensors, flat, grads, allow_unused=True, materialize_grads=True))
    contributions: dict[str, Contribution] = {}
    for current, group in zip(passes, targets, strict=True):
        if group:
            contributions |= current.contributions([next(gradients) for _ in group], axis, call.batch_size)
    return contributions


def _require_batched(call: LayerCall, values: Any, dims: int) -> None:
    """Refuse inputs without a batch dimension of their own."""
    name = layer_name(call)
    if isinstance(values, PackedSequence):
        raise UnsupportedGradientError(
            f"{name} got a PackedSequence, where each time has another number of samples; expected a padded tensor. "
            "Pass the padded batch itself, and mask the loss where it is padding."
        )
    if values.dim() != dims:
        raise UnsupportedGradientError(
            f"{name} got an unbatched input of shape {tuple(values.shape)}; expected {dims} dimensions, with samples. "
            f"Type input.unsqueeze({0 if dims == 2 or call.module.batch_first else 1})."
        )


def _state(given: Any) -> State:
    """The given initial state as a tuple, empty if none was given."""
    if given is None:
        return ()
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _zero_state(current: _Pass, sequence: Tensor) -> State:
    """``h`` is as wide as the recurrent weight takes it, ``c`` as wide as one gate."""
    hidden = sequence.new_zeros(sequence.shape[1], current.weight_hh.shape[1])
    if not isinstance(current, _LstmPass):
        return (hidden,)
    return hidden, sequence.new_zeros(sequence.shape[1], current.weight_hh.shape[0] // 4)
