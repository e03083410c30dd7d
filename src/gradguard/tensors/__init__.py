"""The lowest layer: tensors in, tensors out. Modules, optimizers and process groups do not appear here.

A list of gradients is first admitted (`tensor_admission`), then measured (`norms`, `units`, `nonfinite`) and written
(`scaling`, `units`). Each of these uses the compiled kernels if they accept the whole list (`kernels`), and otherwise
PyTorch's own operations on suitable views (`layout`).

**Guarantees.** Norms are accumulated in float64, in float32 on MPS. A scaled element is rounded once. Dense tensors on
an accelerator never cause a host sync, except in `nonfinite`, which reads one value if the caller asks for an error.
"""
