"""The gradient check: is a backward the derivative of its forward?

`gradcheck` makes a `function.Function` of the callable: flat float64 vectors in, flat vectors out. `contract` compares
backward runs with one another. `search` compares the gradient with `differences` along random directions, halves a
direction that disagrees until single elements are left, and has `direction_verdict` look at each: wrong, a kink, a
jump, a pole, a tie (`meeting_pieces`). `precision` and `rounding` compare lower dtypes with float64. All of them add to
one `gradient_report`. `seed_api` (with `named_call`) is the older interface with a fixed step.

**Guarantees.**

- Neither a step nor a tolerance is chosen: each numerical derivative has an error bar of its own, from the change from
  step to step and the rounding of the outputs.
- A kink or a tie excuses a gradient only where it is proven: two one-sided derivatives that each settle, and differ by
  more than their bars. Whatever is not proven fails, or is INCONCLUSIVE where rounding hides the answer.
- Backward runs are compared with one another bit by bit or by linearity, without differences: repetition, layouts of
  ``grad_output`` and of the inputs, scale, work in place, state between calls, subsets of inputs and of outputs.
- Whatever cannot be checked (sparse, nested, quantized and float8 inputs, DTensors, reentrant checkpoints) is refused,
  never passed.
- Numbers of a GPU are compared on the CPU, and TF32 is off during the check.
- A function that takes float64 is checked there first, whatever the dtype of its inputs.
"""
