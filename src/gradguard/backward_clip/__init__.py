"""Error clip: the gradient of every intermediate value is clipped before the next backward operation takes it.

`error_clip` (`error_clip_block`) opens a scope, behind a loss or for chosen modules and tensors (`scopes`). A scope
walks the autograd graph (`backward_graph`), picks the values to clip (`clipped_slots`), and hooks a rule
(`error_clip_rules`) on the node of each (`hooks`), which statistics may count (`statistics`, with names by
`module_timeline` and `source_lines`). `attach_error_clip` puts the same hooks into compiled code (`compiled`,
`rule_encoding`); `append_backward` clips what each operation returns.

**Guarantees.** Among the blocks that run, each value has one rule, and its accumulated gradient is clipped once. The
gradients of parameters themselves are clipped only under ``leaves=True``, where parameters are chosen, and by
`append_backward`, which clips each contribution alone. The hooks of a block are gone after it, also after an error.
"""
