"""Per-sample gradients: their norms, their clipped sum, and private training with it.

A map, from `clipper` on. Hooks on every layer (`call_tracker`) tap what flows through it (`capture`), and backward
hands each layer's input and output gradient to a mini-batch (`mini_batch`), where the layer's rule (`layers/`) turns
them into a contribution whose norms and clipped sum need no per-sample gradient (`contributions`).

What to do at each call is planned once for each way of calling the model in each of its states (`layer_plans`, by
`module_state`), from a run on two samples and one on three (`dry_run`): by a rule, by known operations with parameters
(`operations`), by running a module's own code again for each sample (`vmap_fallback`), or, where nothing else holds, by
running the whole model for each sample (`sample_loop`, with the tools of `rerun`).

Three looks keep it exact, or refused. Before the first call of a kind `rehearsal` compares samples with what each gives
alone; on each step `operation_trace` tells whether the forward did something that no trial has seen; now and then
`witness` runs a sample of the real step alone. `loss/` holds the loss to what it is said to be.
"""
