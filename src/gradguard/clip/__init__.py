"""Batch clipping: rules that act on the gradients of parameters after backward.

`functional` has the calls, which clip once; a `Clipper` (`clipper`) is a rule as an object, which may remember
(`clip_rules`, `adaptive`, `thresholds/`, put together by `compose`). Both first collect the gradients, each once
(`gradients`). A rule then measures them and makes a `Decision`, which is applied. `Guard` (`guard`) does this at each
real step of an optimizer, and skips a step that is not finite or a spike; where the optimizer's kernel can multiply
by the coefficient, the clip happens there (`optimizer_proxy`). `update` and `qk_clip` clip the update of the weights,
and the weights behind too large attention logits.
"""
