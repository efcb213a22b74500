"""The fused cells of nn.LSTM and nn.GRU, which only CUDA has."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["install"]

LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """Implement the cells and their derivatives with element-wise operators."""
    library = torch.library.Library("aten", "IMPL")
    for name, implementation in {
        "_thnn_fused_lstm_cell": _lstm,
        "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
        "_thnn_fused_gru_cell": _gru,
        "_thnn_fused_gru_cell_backward": _gru_backward,
    }.items():
        library.impl(name, implementation, "CUDA")
    LIBRARIES.append(library)


def _sum(*terms: Tensor | None) -> Tensor:
    total, *rest = (each for each in terms if each is not None)
    for each in rest:
        total = total + each
    return total


def _sigmoid_slope(y: Tensor) -> Tensor:
    return y * (1 - y)


def _tanh_slope(y: Tensor) -> Tensor:
    return 1 - y.square()


def _lstm(
    from_input: Tensor, from_hidden: Tensor, cell: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = _sum(from_input, from_hidden, input_bias, hidden_bias).unflatten(1, (4, -1))
    keep = gates.sigmoid()
    enter, forget, candidate, leave = keep[:, 0], keep[:, 1], gates[:, 2].tanh(), keep[:, 3]
    after = forget * cell + enter * candidate
    return leave * after.tanh(), after, torch.cat([enter, forget, candidate, leave], 1)


def _lstm_backward(
    grad_hidden: Tensor | None,
    grad_after: Tensor | None,
    cell: Tensor,
    after: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    enter, forget, candidate, leave = workspace.chunk(4, 1)
    squashed = after.tanh()
    through = _sum(
        torch.zeros_like(after),
        grad_after,
        None if grad_hidden is None else grad_hidden * leave * _tanh_slope(squashed),
    )
    to_leave = torch.zeros_like(after) if grad_hidden is None else grad_hidden * squashed
    gates = torch.cat(
        [
            through * candidate * _sigmoid_slope(enter),
            through * cell * _sigmoid_slope(forget),
            through * enter * _tanh_slope(candidate),
            to_leave * _sigmoid_slope(leave),
        ],
        1,
    )
    return gates, through * forget, gates.sum(0) if has_bias else None


def _gru(
    from_input: Tensor, from_hidden: Tensor, hidden: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = _sum(from_input, input_bias).chunk(3, 1)
    h = _sum(from_hidden, hidden_bias).chunk(3, 1)
    reset, update = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
    candidate = (x[2] + reset * h[2]).tanh()
    return torch.lerp(candidate, hidden, update), torch.cat([reset, update, candidate, hidden, h[2]], 1)


def _gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, candidate, hidden, recurrent = workspace.chunk(5, 1)
    to_candidate = grad * (1 - update) * _tanh_slope(candidate)
    to_reset = to_candidate * recurrent * _sigmoid_slope(reset)
    to_update = grad * (hidden - candidate) * _sigmoid_slope(update)
    from_input = torch.cat([to_reset, to_update, to_candidate], 1)
    from_hidden = torch.cat([to_reset, to_update, to_candidate * reset], 1)
    biases = (from_input.sum(0), from_hidden.sum(0)) if has_bias else (None, None)
    return from_input, from_hidden, grad * update, *biases
