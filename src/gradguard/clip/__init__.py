"""Batch clipping: rules that act on the gradients of parameters after backward.

`functional` has the calls, which clip once. A `Clipper` (`clipper`) is a rule as an object, which may keep state
(`clip_rules`, `adaptive`, `thresholds/`, combined by `compose`). Both first collect the gradients, each once
(`gradients`). A rule then measures them and returns a `Decision`, which is applied. `Guard` (`guard`) does this at each
real step of an optimizer, and skips a step that is non-finite or a spike. If the optimizer's kernel can multiply by the
coefficient, the kernel clips (`optimizer_proxy`). `update` clips the update of the weights, `qk_clip` the weights that
cause too large attention logits.
"""
