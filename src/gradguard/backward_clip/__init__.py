"""Error clip: clip the gradient of every intermediate value before the next backward operation uses it.

`error_clip` (`error_clip_block`) opens a scope for the graph behind a loss, or for chosen modules and tensors
(`scopes`). The scope walks the autograd graph (`backward_graph`), selects the values to clip (`clipped_slots`), and
hooks a rule (`error_clip_rules`) on each value's node (`hooks`). `statistics` counts the clipped gradients;
`module_timeline` and `source_lines` name their origin. `attach_error_clip` puts the same hooks into compiled code
(`compiled`, `rule_encoding`). `append_backward` clips the gradients that each backward operation returns.

**Guarantees.**

- Among the running blocks, each value has one rule, and its accumulated gradient is clipped once.
- Gradients of parameters are clipped only under ``leaves=True``, if parameters are chosen as tensors, and by
  `append_backward`, which clips each contribution separately.
- The hooks of a block are removed at its end, also after an error.
"""
