"""Per-sample gradients: their norms, and their clipped sum.

A map, from `sample_clipper` on. Hooks on every layer (`call_tracker`) tap its inputs and outputs (`capture`). In
backward each layer's input and output gradient go to a mini-batch (`mini_batch`), where the layer's rule (`layers/`)
turns them into a contribution whose norms and clipped sum need no per-sample gradient (`contributions`).

The treatment of each call is planned once for each way of calling the model in each of its states (`layer_plans`,
`module_state`), from a run on two samples and one on three (`dry_run`). Four treatments exist: a rule; known operations
with parameters (`operations`); running a module's own code again for each sample (`vmap_fallback`); and, if nothing
else is possible, running the whole model for each sample (`sample_loop`, with the tools of `rerun`).

Three checks make the gradients exact, or refused. Before the first call of a kind, `rehearsal` compares samples in a
batch with the same samples alone. On each step, `operation_trace` detects a forward with operations that were not
verified. Now and then, `witness` runs a sample of the real step alone. `loss/` verifies the declared loss reduction.
"""
