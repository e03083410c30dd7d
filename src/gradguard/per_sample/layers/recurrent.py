"""The rules of recurrent layers and cells, which unroll the layer over time a second time (`layer_replay`)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.contributions import Contributions
from gradguard.per_sample.layers.call import LayerCall, sample_axis, zeros
from gradguard.per_sample.layers.layer_replay import LayerReplay, replayed

State = tuple[Tensor, ...]
"""``(h,)``, or ``(h, c)`` of an LSTM, each ``[rows, H]``."""


class _RecurrentArguments(NamedTuple):
    """The arguments of every recurrent forward, in order."""

    input: Any
    hx: Any = None

    @property
    def states(self) -> State:
        """The initial state of the call; empty if it got none."""
        if self.hx is None:
            return ()
        return (self.hx,) if isinstance(self.hx, Tensor) else tuple(self.hx)


class _DirectedLayer:
    """One layer in one direction.

    Args:
        replay: Records the linear maps.
        module: The layer, or a cell.
        suffix: The end of the parameters' names, such as ``"_l1_reverse"``.
    """

    def __init__(self, replay: LayerReplay, module: nn.RNNBase | nn.RNNCellBase, suffix: str = "") -> None:
        self._replay, self._module, self._suffix = replay, module, suffix

    def run(self, sequence: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs ``[T, rows, H]`` and the last state."""
        if not state:
            rows, size = sequence.shape[1], self._module.hidden_size
            hidden = sequence.new_zeros(rows, _projection(self._module) or size)
            state = hidden, sequence.new_zeros(rows, size)
        steps = self._linear("ih", sequence).unbind(0)  # one product of the input for all time steps
        reverse = self._suffix.endswith("_reverse")
        outputs: list[Tensor] = []
        for inputs in reversed(steps) if reverse else steps:
            state = self._step(inputs, self._linear("hh", state[0]), state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs), state

    def _linear(self, side: str, values: Tensor) -> Tensor:
        bias = f"bias_{side}{self._suffix}" if self._module.bias else None
        return self._replay.linear(values, f"weight_{side}{self._suffix}", bias)

    def _step(self, inputs: Tensor, hidden: Tensor, state: State) -> State:
        """Advance by one time step, from the products of the input and of the hidden state with their weights."""
        if isinstance(self._module, nn.LSTM | nn.LSTMCell):
            input_gate, forget_gate, new, output_gate = (inputs + hidden).chunk(4, 1)
            cell = torch.sigmoid(forget_gate) * state[1] + torch.sigmoid(input_gate) * torch.tanh(new)
            output = torch.sigmoid(output_gate) * torch.tanh(cell)
            return self._projected(output), cell
        if isinstance(self._module, nn.GRU | nn.GRUCell):
            (reset, update, new), (of_reset, of_update, of_new) = inputs.chunk(3, 1), hidden.chunk(3, 1)
            new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
            return (torch.lerp(new, state[0], torch.sigmoid(update + of_update)),)
        return (getattr(torch, str(self._module.nonlinearity))(inputs + hidden),)

    def _projected(self, output: Tensor) -> Tensor:
        return self._replay.linear(output, f"weight_hr{self._suffix}") if _projection(self._module) else output


def _projection(module: nn.RNNBase | nn.RNNCellBase) -> int:
    """Return the size to which an LSTM projects its output; 0 for no projection."""
    return module.proj_size if isinstance(module, nn.RNNBase) else 0


def recurrent(call: LayerCall) -> Contributions:
    """Return the contribution to each wanted parameter of a ``torch.nn.LSTM``, ``torch.nn.GRU`` or ``torch.nn.RNN``.

    Raises:
        UnsupportedGradientError: If the input is packed or unbatched, samples are in another dimension than the
            layer's batch, or a second run of the forward returns other outputs.
    """
    module = call.module
    assert isinstance(module, nn.RNNBase)
    if not call.batch_size:
        return zeros(call)
    arguments = _RecurrentArguments(*call.args, **call.kwargs)
    _require_batched(call, arguments.input, 3)
    dimensions = {"input": (arguments.input, 0 if module.batch_first else 1)}
    dimensions |= {name: (tensor, 1) for name, tensor in zip(("h_0", "c_0"), arguments.states, strict=False)}
    axis = sample_axis(call, dimensions, f"batch_first={module.batch_first}")
    dropout = module.dropout if module.training and module.num_layers > 1 else 0.0
    return replayed(call, axis, dropout, lambda replay: _run_layers(replay, module, arguments, dropout))


def _run_layers(
    replay: LayerReplay, module: nn.RNNBase, arguments: _RecurrentArguments, dropout: float
) -> list[Tensor]:
    """Return the tensors that the layer returns."""
    dtype = module.get_parameter("weight_hh_l0").dtype
    sequence = arguments.input.transpose(0, 1) if module.batch_first else arguments.input
    sequence, given = sequence.to(dtype), [tensor.to(dtype) for tensor in arguments.states]
    last: list[State] = []
    for layer in range(module.num_layers):
        if dropout and layer:
            sequence = F.dropout(sequence, dropout)
        directions: list[Tensor] = []
        for suffix in ("", "_reverse")[: 1 + module.bidirectional]:
            start = tuple(tensor[len(last)] for tensor in given)
            output, state = _DirectedLayer(replay, module, f"_l{layer}{suffix}").run(sequence, start)
            directions.append(output)
            last.append(state)
        sequence = torch.cat(directions, 2)
    output = sequence.transpose(0, 1) if module.batch_first else sequence
    return [output, *(torch.stack(states) for states in zip(*last, strict=True))]


def recurrent_cell(call: LayerCall) -> Contributions:
    """Return the contribution to each wanted parameter of a ``torch.nn.LSTMCell``, ``GRUCell`` or ``RNNCell``.

    Raises:
        UnsupportedGradientError: If the input is unbatched, samples are in another dimension than the first, or a
            second run of the forward returns other outputs.
    """
    module = call.module
    assert isinstance(module, nn.RNNCellBase)
    if not call.batch_size:
        return zeros(call)
    arguments = _RecurrentArguments(*call.args, **call.kwargs)
    _require_batched(call, arguments.input, 2)
    given = (arguments.input, *arguments.states)
    axis = sample_axis(call, {name: (x, 0) for name, x in zip(("input", "h", "c"), given, strict=False)}, "a cell")
    sequence, *state = (tensor.to(module.weight_hh.dtype) for tensor in given)
    return replayed(
        call, axis, 0.0, lambda replay: [*_DirectedLayer(replay, module).run(sequence.unsqueeze(0), tuple(state))[1]]
    )


def _require_batched(call: LayerCall, values: Any, dims: int) -> None:
    """Refuse packed inputs, and inputs without a batch dimension."""
    if isinstance(values, PackedSequence):
        raise UnsupportedGradientError(
            f"{call.name} got a PackedSequence, whose number of samples differs between time steps; expected a padded "
            "tensor. Pass the padded batch itself, and mask the padding in the loss."
        )
    if values.dim() != dims:
        raise UnsupportedGradientError(
            f"{call.name} got an unbatched input of shape {tuple(values.shape)}; expected {dims} dimensions, one of "
            f"them the batch. Type input.unsqueeze({0 if dims == 2 or call.module.batch_first else 1})."
        )
