"""Compare the norm that an engine computes, reports and applies with the true norm of the gradients.

The true norm is measured from the gradients that the processes hold.

**Guarantees.**

- PASS requires that each class of tensors counts once and that all classes together do. With ``max_norm``, each
  gradient must also be multiplied by min(1, max / norm). A class whose squares are too small a part of
  the norm to judge is in the notes.
- Copies and parts are recognised by their values. An engine's attributes never make a PASS where values contradict
  them: the verdict is INCONCLUSIVE, and the finding says which ``groups`` to pass.
- If a norm was only reported, a mistake is named only if no other known mistake explains the number.
- An audit of a script changes no gradient. It ends the script after the audited steps unless the run is also recorded.
  A clip by value, a norm of another order, and a step without a clip are INCONCLUSIVE.
"""
