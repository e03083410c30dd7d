"""What becomes of each model that is not exact; ``python tests/per_sample/zoo/summary.py --write`` makes this table."""

EXPECTED: dict[str, dict[str, str]] = {
    "batch norm": {
        "train": "refused: it normalizes each sample by the others",
    },
    "batch norm, then in place": {
        "train": "refused: it normalizes each sample by the others",
    },
    "rnn": {
        "bfloat16": "refused: or its output before the clipper's hook gets it? Nothing",
    },
    "+= after batch norm": {
        "train": "refused: it normalizes each sample by the others",
    },
    "routed mixture of experts, dropout": {
        "train": "refused: so each sample's share cannot be determined",
    },
    "capacity over the batch": {
        "eval": "refused: Model treats a sample alone in another way than in the batch",
        "train": "refused: Model treats a sample alone in another way than in the batch",
        "float32": "refused: Model treats a sample alone in another way than in the batch",
        "bfloat16": "refused: Model treats a sample alone in another way than in the batch",
    },
    "experts choose": {
        "eval": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "train": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "float32": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "bfloat16": "refused: so the sample that a row of a layer belongs to changes from batch to",
    },
    "mixed up": {
        "eval": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "train": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "float32": "refused: so the sample that a row of a layer belongs to changes from batch to",
        "bfloat16": "refused: so the sample that a row of a layer belongs to changes from batch to",
    },
    "a running mean": {
        "train": "refused: weight is not the gradient of the sample alone",
    },
    "attention over the batch": {
        "eval": "refused: weight is not the gradient of the sample alone",
        "train": "refused: weight is not the gradient of the sample alone",
        "float32": "refused: weight is not the gradient of the sample alone",
        "bfloat16": "refused: weight is not the gradient of the sample alone",
    },
    "centred over the batch": {
        "eval": "refused: weight is not the gradient of the sample alone",
        "train": "refused: weight is not the gradient of the sample alone",
        "float32": "refused: weight is not the gradient of the sample alone",
        "bfloat16": "refused: weight is not the gradient of the sample alone",
    },
    "two towers": {
        "eval": "refused: Expected one dimension that grows with the number of samples",
        "train": "refused: Expected one dimension that grows with the number of samples",
        "float32": "refused: Expected one dimension that grows with the number of samples",
        "bfloat16": "refused: Expected one dimension that grows with the number of samples",
    },
    "contrastive": {
        "eval": "refused: Expected one dimension that grows with the number of samples",
        "train": "refused: Expected one dimension that grows with the number of samples",
        "float32": "refused: Expected one dimension that grows with the number of samples",
        "bfloat16": "refused: Expected one dimension that grows with the number of samples",
    },
    "penalty beside the output: attribute": {
        "eval": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Beside that uses mu cannot be run again sample by sample",
    },
    "penalty beside the output: private attribute": {
        "eval": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Beside that uses mu cannot be run again sample by sample",
    },
    "penalty beside the output: list": {
        "eval": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Beside that uses mu cannot be run again sample by sample",
    },
    "penalty beside the output: attribute of a layer": {
        "eval": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Beside that uses mu cannot be run again sample by sample",
    },
    "penalty beside the output: object": {
        "eval": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Beside that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Beside that uses mu cannot be run again sample by sample",
    },
    "penalty beside the output: output": {
        "eval": "refused: Beside computes a value from its parameters alone",
        "train": "refused: Beside computes a value from its parameters alone",
        "float32": "refused: Beside computes a value from its parameters alone",
        "bfloat16": "refused: Beside computes a value from its parameters alone",
    },
    "penalty beside the output: closure": {
        "eval": "refused: the code of Model that uses mu cannot be run again sample by sample",
        "train": "refused: the code of Model that uses mu cannot be run again sample by sample",
        "float32": "refused: the code of Model that uses mu cannot be run again sample by sample",
        "bfloat16": "refused: the code of Model that uses mu cannot be run again sample by sample",
    },
    "penalty in the loss": {
        "eval": "refused: or by code that the module does not call through a layer",
        "train": "refused: or by code that the module does not call through a layer",
        "float32": "refused: or by code that the module does not call through a layer",
        "bfloat16": "refused: or by code that the module does not call through a layer",
    },
    "load balance beside the output": {
        "eval": "refused: and its result is no sum of parts of single samples",
        "train": "refused: and its result is no sum of parts of single samples",
        "float32": "refused: and its result is no sum of parts of single samples",
        "bfloat16": "refused: and its result is no sum of parts of single samples",
    },
    "an activation in place inside a batch norm": {
        "bfloat16": "refused: Move dropout and other random operations into a layer of their own",
    },
    "an activation in place behind a layer inside a batch norm": {
        "bfloat16": "refused: Move dropout and other random operations into a layer of their own",
    },
    "scores of all pairs": {
        "eval": "refused: in which no dimension belongs to samples alone",
        "train": "refused: in which no dimension belongs to samples alone",
        "float32": "refused: in which no dimension belongs to samples alone",
        "bfloat16": "refused: in which no dimension belongs to samples alone",
    },
    "patches behind a batch norm": {
        "eval": "refused: weight is not the gradient of the sample alone",
        "float32": "refused: weight is not the gradient of the sample alone",
    },
    "functional_call with values of weights": {
        "eval": "refused: the module was called with another tensor in the place of its",
        "train": "refused: the module was called with another tensor in the place of its",
        "float32": "refused: the module was called with another tensor in the place of its",
        "bfloat16": "refused: the module was called with another tensor in the place of its",
    },
    "nllb-moe": {
        "train": "refused: NllbMoeModel treats a sample alone in another way than in the batch",
    },
    "switch_transformers": {
        "train": "refused: so each sample's share cannot be determined",
    },
    "cvt": {
        "train": "refused: it normalizes each sample by the others",
    },
    "efficientnet": {
        "train": "refused: it normalizes each sample by the others",
    },
    "mobilevit": {
        "train": "refused: it normalizes each sample by the others",
    },
    "regnet": {
        "train": "refused: it normalizes each sample by the others",
    },
    "resnet": {
        "train": "refused: it normalizes each sample by the others",
    },
    "swiftformer": {
        "train": "refused: it normalizes each sample by the others",
    },
    "timesformer": {
        "train": "refused: TimesformerModel treats a sample alone in another way than in the",
    },
    "wav2vec2-conformer": {
        "train": "refused: it normalizes each sample by the others",
    },
    "clip, loss over pairs": {
        "eval": "refused: in which no dimension belongs to samples alone",
    },
}
