"""gradguard in the trainers people use: one file for each, on the public API only, imported only by who asks for it.

Each file needs its own package (``pip install "gradguard[lightning]"``), checks its version when it is imported, and
is imported by its full name: ``from gradguard.integrations.lightning import GradGuardCallback``.
"""
