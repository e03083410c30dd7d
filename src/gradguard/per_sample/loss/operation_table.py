"""State what is known of each of autograd's operations, once: the names of operations, then their facts.

| fact | the operation |
|---|---|
| ``elementwise`` | is linear, and leaves every element in its place; it may broadcast it |
| ``reshapes``, ``turns``, ``joins`` | is linear, and moves elements |
| ``cuts`` | takes positions along a dimension; its settings, or the number of its result, give them |
| ``selects`` | chooses rows by a tensor |
| ``mean``, ``sum``, ``product`` | adds elements up; a product weighs them |
| ``function`` | is not linear, and computes each number from one number of each input |
| ``addition``, ``scaling`` | adds, or multiplies or divides |
| ``chooses`` | chooses elements by a tensor, and is linear once these are fixed |
| ``fixed`` | is linear once its selection is fixed; a loss is not read through it otherwise |
| ``reduces`` | mixes the elements along some dimensions |
| ``compares`` | selects a value by comparing it with others, possibly those of other samples |
| ``rows`` | may reduce its rows, too; its saved ``reduction`` is 0 for none, 1 mean, 2 sum |
| ``labels`` | has a label in each row; a label may be missing (``ignore_index``) |
| ``broadcasts`` | repeats a value along the dimensions of another value or of a constant |
| ``saves`` | broadcasts a constant beside values, and saves it |
| ``adds`` | is affine, and does not save what it adds |
| ``alone`` | has constants that lie beside no value: it selects or puts values, or occurs in modules only |
| ``index``, ``position`` | is told positions by a tensor, along its ``dim``, or by tensors for the first dimensions |
| ``order`` | keeps the samples in their order, if each sample's values are adjacent |
| ``sizes`` | occurs in the graph or not depending on the sizes of a batch |
| ``shown`` | saves every constant that it takes, or the constant follows from known values |
| ``read`` | has settings, and constants of one number, that can all be read |
"""

_ROWS = """
Add Rsub Sub | elementwise addition broadcasts adds shown read
Alias Clone | elementwise sizes shown read
CopyBackwards | elementwise shown
Div Mul | elementwise scaling broadcasts saves shown read
Expand | elementwise broadcasts shown read
MaskedFill | elementwise broadcasts saves shown
NanToNum | elementwise shown
Neg ToCopy | elementwise shown read
Where | elementwise broadcasts saves adds shown
ReshapeAlias UnsafeView View | reshapes sizes shown read
Squeeze Unsqueeze | reshapes shown read
Permute T Transpose | turns shown read
Cat Stack | joins adds shown read
Select Split SplitWithSizes Unbind | cuts shown read
Slice | cuts order sizes shown read
UnsafeSplit | cuts shown
Index | selects alone position shown
IndexSelect | selects index shown
MaskedSelect | selects saves position shown
Mean | mean reduces order shown read
Nansum | sum reduces shown
Sum | sum reduces order shown read
Addmm | product adds order shown
Addmv Baddbmm | product adds shown
Bmm Mm | product order shown read
Dot | product saves shown read
Mv | product shown read
Abs Cos Digamma Elu Erf Exp Expm1 Hardtanh LeakyRelu Lgamma Log Log10 Log1P Log2 | function shown read
LogSigmoid LogSigmoidForward Mish Reciprocal Relu Rsqrt Sgn Sigmoid Silu Sin Softplus | function shown read
Sqrt Tanh | function shown read
Clamp ClampMax ClampMin | function saves shown read
Gelu | function shown
Maximum Minimum | function compares broadcasts saves shown read
Pow | function broadcasts saves shown read
BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss SmoothL1Loss SoftMarginLoss | rows saves shown
MultiMarginLoss MultilabelMarginLoss | rows shown
NllLoss NllLoss2D | rows labels shown
Amax Max | fixed reduces compares order shown
Amin Min Sort Topk | fixed reduces compares shown
Cumsum | fixed reduces order shown read
Kthvalue Median | fixed reduces compares
LinalgVectorNorm LogSoftmax Logsumexp Norm Softmax | reduces order shown read
Prod | reduces shown read
Std Var | reduces order shown
StdMean VarMean | reduces
Gather | chooses fixed index order shown
Take | chooses fixed position shown
TakeAlongDim | chooses fixed index
IndexAdd IndexCopy IndexFill Scatter ScatterAdd | index
IndexReduce ScatterReduce | compares index
IndexPut IndexPutImpl MaskedScatter Put | position
AdaptiveMaxPool2D AdaptiveMaxPool3D Aminmax Bucketize Dist FractionalMaxPool2D MaxPool2DWithIndices | compares
MaxPool3DWithIndices Mode Nanmedian SegmentReduce Unique Unique2 UniqueDim | compares
Cummax Cummin | compares shown
Fmax Fmin | compares broadcasts saves
Diagonal Tril Triu | fixed
Flip Repeat Roll | fixed shown
Acos Acosh Asin Asinh Atan Atanh Cosh CtcLoss Cumprod Erfc Hardshrink Hardsigmoid Hardswish LinalgSvd | shown
Logcumsumexp Sinh Softshrink Tan | shown
Addcdiv Addcmul | saves adds shown
Atan2 | broadcasts saves shown
Convolution ConvolutionOverrideable CopySlices torch::autograd::CopySlices | alone
Hypot | broadcasts
Lerp | broadcasts saves adds
Logaddexp Logaddexp2 | saves shown
NativeLayerNorm SpecialXlog1Py | saves
WeightNormInterface | read
Xlogy | broadcasts saves order shown
"""

_FACTS = {
    name: frozenset(facts.split())
    for names, _, facts in (row.partition("|") for row in _ROWS.strip().splitlines())
    for name in names.split()
}


def operations(*facts: str) -> frozenset[str]:
    """Return the names of the operations that have at least one of these facts."""
    return frozenset(name for name, own in _FACTS.items() if not own.isdisjoint(facts))


ADDITIONS, SCALINGS = operations("addition"), operations("scaling")
ADDS_UNSEEN = operations("adds")
FUNCTIONS = operations("function")
FUSED = operations("rows")
"""Losses that may reduce their rows in the same operation."""

LABELLED = operations("labels")
ELEMENTWISE = operations("elementwise")
RESHAPING, JOINING, TAKING, SELECTING = (operations(one) for one in ("reshapes", "joins", "cuts", "selects"))
MOVING = operations("reshapes", "turns", "joins", "cuts", "selects")
MEANS = operations("mean")
ALL_PRODUCTS = operations("product")
PRODUCTS = ALL_PRODUCTS - ADDS_UNSEEN
"""Products of vectors and matrices that add no third one."""

ADDING = PRODUCTS | operations("sum")
SUMMING = operations("mean", "sum") | {"Cumsum"}
LINEAR = ELEMENTWISE | MOVING | MEANS | ADDING
CHOOSING_ROWS = operations("selects", "chooses")
SINGLY = operations("read") & (ELEMENTWISE | FUNCTIONS)
"""Operations that compute each number from one number of each input, and of which all settings can be read."""
