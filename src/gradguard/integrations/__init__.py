"""gradguard in trainers: one file for each, built on the public API only, and imported only on request.

Each file needs its own package (``pip install "gradguard[lightning]"``), checks its version when it is imported, and
is imported by its full name: ``from gradguard.integrations.lightning import GradGuardCallback``.

An adapter provides a trainer's optimizers, the begin and end of a run, and access to its checkpoints. The jobs do the
rest, once for all trainers (`adapter.Job`, in `guard_job` and `sample_jobs`). Four files have no job. `timm` is one
function that clips. `deepspeed`'s engine clips by itself, so the file only reads the norm and the threshold of that
clip. `keras` has its own optimizers, which are not PyTorch's and run no hooks. `torchtitan`'s trainer calls a function
of a module and has no event for the begin of a run.
"""
