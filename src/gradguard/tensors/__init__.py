"""The ground floor: tensors in, tensors out. Nothing here knows of modules, optimizers or process groups."""
