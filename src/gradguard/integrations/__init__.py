"""gradguard in the trainers people use: one file for each, on the public API only, imported only by who asks for it.

Each file needs its own package (``pip install "gradguard[lightning]"``), checks its version when it is imported, and
is imported by its full name: ``from gradguard.integrations.lightning import GradGuardCallback``.

An adapter says where a trainer has its optimizers, when a run begins and ends and what its checkpoints hold; the jobs
do the rest, once for all trainers (`adapter.Job`, in `guard_job` and `sample_jobs`). `deepspeed` has no job, because
the engine clips by itself, and the file only reads the norm and the threshold of that clip. `keras` has none, because
its optimizers are not PyTorch's and run no hooks. `torchtitan` has none, because its trainer calls a function of a
module, and never says that a run begins.
"""
