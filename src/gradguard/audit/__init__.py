"""Is the norm that an engine computes, reports and applies the true one? From what the processes hold.

**Guarantees.**

- PASS needs that each class of tensors counts once, that all together do, and, with ``max_norm``, that each gradient
  was multiplied by min(1, max / norm). A class whose squares are too small a part of the norm to show is in the notes.
- Copies and parts are recognised by their values. Attributes of an engine never make a PASS where values contradict
  them: it is INCONCLUSIVE, with the ``groups`` to pass.
- Of a norm that was only reported, a mistake is named only if it is the only known one that explains the number.
- An audit of a script changes no gradient, and ends the script after its steps unless it is recorded as well. A clip
  by value, a norm of another order, and gradients of a step without a clip are INCONCLUSIVE.
"""
