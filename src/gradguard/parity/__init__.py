"""Compare the gradients of two runs by sketches, with an error bar for rounding and a verdict for each parameter.

**Guarantees.**

- The caller chooses no tolerance. The bar of a parameter is the largest change of its gradient in runs that differ by
  rounding, in either set-up, and at least the rounding of one sum. Two gradients up to three bars apart are equal.
- A PASS requires that an error would have shown in more than half of the parameters; a note names the others. Runs with
  different weights or different optimizer settings never pass.
- A verdict states how large an error of a gradient would have shown.
- A common factor of many parameters is one finding. The findings belong to the first stage of a step that differs; a
  note counts the differences of the stages that follow.
- A file contains numbers and text only; reading it runs no code.
- Ranks exchange 32 numbers for each parameter, whatever its size and layout; no tensor is gathered.
"""
