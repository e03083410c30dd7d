"""The ground floor: tensors in, tensors out. Nothing here knows of modules, optimizers or process groups.

A list of gradients is first admitted (`tensor_admission`), then measured (`norms`, `units`, `nonfinite`) and written
(`scaling`, `units`). Each of these takes the compiled kernels where they take the whole list (`kernels`), and otherwise
PyTorch's own operations on views that suit them (`layout`).

**Guarantees.** Norms are accumulated in float64, in float32 on MPS. A scaled element is rounded once. Dense tensors
of an accelerator never make the host wait, except in `nonfinite`, which reads one value where the caller asks for an
error.
"""
