"""What libraries read when they are imported, for the tests and for the examples in docstrings."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # else DeepSpeed, which Transformers imports, prints that it looks for one
