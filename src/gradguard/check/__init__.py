"""The gradient check: is a backward the derivative of its forward?

`gradcheck` wraps the callable in a `function.Function`, which maps flat float64 vectors to flat vectors. `contract`
compares backward runs with one another. `search` compares the gradient with `differences` along random directions, and
halves a direction that disagrees until single elements are left. `direction_verdict` classifies each of them: wrong, a
kink, a jump, a pole, or a tie (`meeting_pieces`). `precision` and `rounding` compare lower dtypes with float64. All of
them add findings to one `gradient_report`. `seed_api` (with `named_call`) is the older interface with a fixed step.

**Guarantees.**

- The caller chooses neither a step nor a tolerance. Each numerical derivative has an error bar of its own, computed
  from the change between steps and the rounding of the outputs.
- A kink or a tie excuses a gradient only where it is proven: two one-sided derivatives each settle, and they differ by
  more than their error bars. An unproven disagreement fails, or is INCONCLUSIVE where rounding hides the answer.
- Backward runs are compared with one another bit by bit or by linearity, without differences: repetition, layouts of
  ``grad_output`` and of the inputs, scale, work in place, state between calls, subsets of inputs and of outputs.
- Inputs and functions that cannot be checked raise an error and never pass: sparse, nested, quantized and float8
  inputs, DTensors, reentrant checkpoints.
- Values on a GPU are compared on the CPU, and TF32 is off during the check.
- A function that accepts float64 is checked in float64 first, whatever the dtype of its inputs.
"""
