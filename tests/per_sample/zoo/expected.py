"""What becomes of each model that is not exact; ``python tests/per_sample/zoo/summary.py --write`` makes this table."""

EXPECTED: dict[str, dict[str, str]] = {
    "batch norm": {
        "train": "refused: it normalizes each sample by the others",
    },
    "packed sequences": {
        "eval": "refused: Expected one dimension that grows with the number of samples",
    },
    "a weight as argument": {
        "eval": "refused: the per-sample gradient of shift is not what the sample gives by",
    },
    "shared position bias": {
        "eval": "refused: SharedBias makes a value from its parameters alone",
    },
    "routed mixture of experts": {
        "eval": "refused: Expected one dimension that grows with the number of samples",
    },
    "capacity over the batch": {
        "eval": "wrong: a.weight",
    },
    "penalty beside the output: attribute": {
        "eval": "refused: the code of Beside uses parameters by itself and stores a tensor with",
    },
    "compiled": {
        "eval": "refused: Give the module as it was before torch",
    },
    "mamba": {
        "eval": "crash: Sizes of tensors must match except in dimension",
    },
    "mixtral": {
        "eval": "refused: Expected one dimension that grows with the number of samples",
    },
    "t5": {
        "eval": "refused: Attention makes a value from its parameters alone",
    },
    "resnet": {
        "eval": "crash: one of the variables needed for gradient computation has been",
    },
    "clip": {
        "eval": "refused: CLIPModel makes a value from its parameters alone",
    },
}
