"""Whether two runs have the same gradients: sketches of them, bars of rounding, and a verdict for each parameter.

**Guarantees.**

- There is no tolerance: the bar of a parameter is the largest change of its gradient in runs that differ by rounding,
  in either set-up, and at least the rounding of one sum. Up to three bars apart, two gradients are equal.
- PASS needs that an error would have shown in more than half of the parameters; a note names the others. Where the
  two runs have other weights, or other settings of the optimizers, it is never a PASS.
- A verdict says how large an error of a gradient would have shown.
- One factor of many parameters is one finding, and the first stage of a step that differs has the findings: the stages
  that follow from it are counted in a note.
- A file holds numbers and text only; reading it runs no code.
- Nothing is gathered but 32 numbers for each parameter, whatever its size and layout.
"""
