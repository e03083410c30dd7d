"""A kernel of Triton, for its interpreter: SiLU with a backward by hand, whose last tile may be forgotten."""

import torch
import triton
import triton.language as tl

TILE = 4


@triton.jit
def forward_kernel(x_ptr, y_ptr, count, tile: tl.constexpr):
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    x = tl.load(x_ptr + places, mask=places < count)
    tl.store(y_ptr + places, x * tl.sigmoid(x), mask=places < count)


@triton.jit
def backward_kernel(x_ptr, v_ptr, gradient_ptr, count, tile: tl.constexpr):
    places = tl.program_id(0) * tile + tl.arange(0, tile)
    x, v = tl.load(x_ptr + places, mask=places < count), tl.load(v_ptr + places, mask=places < count)
    gate = tl.sigmoid(x)
    tl.store(gradient_ptr + places, v * gate * (1 + x * (1 - gate)), mask=places < count)


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forgets_the_last_tile):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.forgets_the_last_tile = forgets_the_last_tile
        y = torch.empty_like(x)
        forward_kernel[(triton.cdiv(x.numel(), TILE),)](x, y, x.numel(), TILE)
        return y

    @staticmethod
    def backward(ctx, v):
        (x,) = ctx.saved_tensors
        gradient = torch.zeros_like(x)
        tiles = x.numel() // TILE if ctx.forgets_the_last_tile else triton.cdiv(x.numel(), TILE)
        backward_kernel[(max(1, tiles),)](x, v.contiguous(), gradient, x.numel(), TILE)
        return gradient, None


def silu(x):
    return SiLU.apply(x, False)


def silu_without_the_last_tile(x):
    return SiLU.apply(x, True)
