"""The table of causes: for each its search, certainty, sentence and advice, in the order of precedence.

Of two causes with the same certainty, the earlier row comes first. The same holds for two rows of one cause.
"""

from collections.abc import Mapping
from functools import partial

from gradguard.monitoring.judge.cause import Cause, Row
from gradguard.monitoring.judge.causes import bad_batches, clip_faults, depth, loop, nonfinite_values, rate, raw_data
from gradguard.monitoring.judge.causes.loop import found, idle
from gradguard.monitoring.judge.causes.nonfinite_values import lost
from gradguard.monitoring.judge.signals import RunSignals

_RATES = ("rate_too_high", "rate_too_low", "rate_decayed", "rate_leapt")
EXCLUDES: Mapping[str, tuple[str, ...]] = {
    "nonfinite_data": ("rate_too_high", "nonfinite_growth"),
    "nonfinite_range": ("rate_too_high", "nonfinite_growth"),
    "nonfinite_growth": ("nonfinite_data", "nonfinite_range", "bad_batches"),
    "clip_before_unscale": ("exploding_depth",),
    "accumulation": _RATES,
    "raw_data": (*_RATES, "exploding_depth", "no_gradient", "not_started"),
    "bad_batches": _RATES,
    "exploding_time": ("bad_batches",),
    "vanishing": ("rate_too_low",),
    "rate_decayed": ("data_shift", "bad_batches"),
    "rate_leapt": ("data_shift", "bad_batches"),
    "drift": ("bad_batches", "data_shift"),
    "rate_too_high": ("bad_batches", "not_started"),
    "rate_too_low": ("vanishing",),
}
"""The causes that are dropped from the list when this one comes first and has a `Cause.rules_out`."""

_NOT_FINITE = (
    "At step {step} the loss or a gradient became NaN or infinite although nothing had grown before: the cause is the "
    "batch or an operation on it."
)
_FIND_NAN = (
    "Check the batch of step {step} for NaN, infinity and empty or corrupt samples, and its operations for a logarithm "
    "of 0, a root of 0 or a division by 0: `gradguard explain nan` finds the sample, the operation and its line. Until "
    'then, skip such steps with gg.Guard(optimizer, gg.ClipByMedian(), nonfinite="skip").'
)
_NOT_GROWN = "Neither a lower learning rate nor a clip prevents this: nothing had grown before."
_FLOAT16 = "A value overflowed float16 (above 65,504) at step {step}{learned}."
_GREW = "Losses and gradients grew until they became NaN or infinite at step {step}."
_USUAL_BEFORE = "The learning rate is not the cause: losses and norms were at their usual level before."
_CLIPPED_SCALED = (
    "Gradients are clipped while they are still multiplied by the loss scale, so the threshold means nothing."
)
_UNSCALE = "Call scaler.unscale_(optimizer) before the clip."
_COMPARED_SCALED = "The threshold itself may be right: it is compared with norms that are thousands of times too large."
_IDLE = "The optimizer stepped {steps} times and none of its parameters ever had a gradient: nothing is trained."
_NOTHING_CHANGES = "Another learning rate or a clip changes nothing here."
_NO_GRADIENT = "No learning rate and no clip can move a parameter that has no gradient."
_ORTHOGONAL = "Initialise the recurrent weight with torch.nn.init.orthogonal_, or use an LSTM or GRU"

CAUSES = (
    *(
        Row("nonfinite_data", partial(lost, by), certainty, _NOT_FINITE, _FIND_NAN, _NOT_GROWN)
        for by, certainty in (("data", "certain"), ("batch", "likely"))
    ),
    Row(
        "nonfinite_range", partial(lost, "small type"), "likely", _FLOAT16,
        "Use bfloat16, which has the range of float32, in place of float16; or compute the overflowing part in "
        "float32, such as the logits and the loss with .float() inside torch.autocast(\"cuda\", enabled=False). If the "
        "values of step {step} are not finite in float32 either, the batch is the cause: look for an empty row or a "
        "division by 0.",
        _USUAL_BEFORE,
    ),
    Row(
        "nonfinite_range", partial(lost, "exponential"), "likely",
        "An exponential overflowed float32 at step {step}{learned}.",
        "Compute it in a stable form: torch.logsumexp, log_softmax, softplus or cross_entropy in place of exp, or "
        "subtract the largest value before exp. If it already is stable, the batch of step {step} differs from the "
        "others.",
        _USUAL_BEFORE,
    ),
    Row(
        "nonfinite_range", nonfinite_values.scale_collapses, "likely",
        "Gradients overflow float16 at every loss scale, so one step after another is skipped.",
        "Use bfloat16 in place of float16, without a GradScaler; if values still become NaN or infinite, "
        "`gradguard explain nan` finds the operation.",
    ),
    *(
        Row("clip_before_unscale", look, "certain", _CLIPPED_SCALED, _UNSCALE, _COMPARED_SCALED)
        for look in (partial(found, "clip_before_unscale"), loop.norms_follow_scale)
    ),
    Row(
        "clip_twice", clip_faults.clips_twice, "likely",
        "Gradients are clipped {count} times in each step: a later clip gets gradients that an earlier one has already "
        "changed.",
        "Keep either {clip} or the other clip, and remove the one that binds on most steps.",
    ),
    Row(
        "clip_starves", clip_faults.starves_below_eps, "certain",
        "{clip} starves the optimizer: the clipped gradients are below its eps, {eps}, and hardly move a weight.",
        "{advice}",
        "An optimizer that divides by the size of the gradients cancels a clip only while they are above its eps.",
    ),
    Row(
        "clip_starves", clip_faults.starves_rate, "likely",
        "{clip} starves the optimizer: in effect it multiplies the learning rate by {coefficient}.",
        "{advice}",
        "The script's learning rate is not the effective one: the clip sets that.",
    ),
    Row(
        "clip_starves", clip_faults.starves_unseen, "likely",
        "Code that gradguard did not observe scales gradients to a norm of {norm}, and such steps hardly move a "
        "weight.",
        "Look between backward() and step() for code that multiplies or divides p.grad, and remove it, or raise its "
        "threshold a hundredfold and run again.",
        "The script's learning rate is not the effective one: this scaling sets that.",
    ),
    Row(
        "accumulation", partial(found, "missing_zero_grad"), "certain",
        "Gradients are never cleared: each step follows the sum of all gradients so far.",
        "Call optimizer.zero_grad() once for each step, before its first backward().",
        "The learning rate may be right: neither a threshold nor a rate can be derived from such norms.",
    ),
    Row(
        "accumulation", loop.summed_micro_batches, "certain",
        "Gradients of {count} micro-batches are summed in each step, so the effective learning rate is {count} times "
        "the one that is set.",
        "Divide the loss by {count} before backward(), as in (loss / {count}).backward().",
    ),
    Row(
        "no_gradient",
        partial(
            idle,
            "Gradients exist after backward() and are gone at step(): zero_grad() is called between the two.",
            lambda signals: any("order" in parameter for parameter in signals.params),
        ),
        "certain", _IDLE,
        "Call optimizer.zero_grad() before backward(), or after optimizer.step(), but not between the two.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient",
        partial(
            idle,
            "The backward pass reaches {leaves} leaf tensors, and the optimizer holds none of them.",
            lambda signals: bool(signals.leaves),
        ),
        "certain", _IDLE,
        "Construct the optimizer with the parameters of the very model that computes the loss: not with those of a "
        "copy, and not before the model is rebuilt, moved or wrapped.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient",
        partial(
            idle,
            "The backward pass reaches no parameter: the loss is cut off from the model.",
            lambda signals: signals.leaves == 0,
        ),
        "certain", _IDLE,
        "Look between the model's output and the loss for detach(), .data, .item(), torch.no_grad(), or a tensor "
        "constructed from plain numbers, and remove it.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", partial(idle, "{message}.", lambda signals: True), "certain", _IDLE, "{advice}.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", loop.all_zero, "certain",
        "Every gradient is exactly 0 on every step: nothing is trained.",
        "Check that zero_grad() is not called between backward() and step(), and that the loss is computed from the "
        "model's output without detach(), round(), argmax() or a comparison on the way.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", loop.replaced, "likely",
        "The optimizer holds {old}, which never get a gradient, but not {new}, which do.",
        "Construct the optimizer after the last part of the model was replaced, with the parameters that the forward "
        "pass uses. If no part was replaced, {new} may be in a plain list, which should be an nn.ModuleList.",
        _NO_GRADIENT,
    ),
    Row(
        "no_gradient", loop.frozen, "likely",
        "{count} of {all} parameters are frozen, {rest}.",
        "If they should be trained, call requires_grad_(True) on them before the first forward pass; if not, give the "
        "optimizer only the others.",
        _NO_GRADIENT, may_be_meant=True,
    ),
    Row(
        "no_gradient", loop.cut_off, "likely",
        "{count} of {all} parameters never get a gradient{where}, and keep their initial values.",
        "If a part of the model was replaced after the optimizer was constructed, construct the optimizer again: it "
        "holds the old part. Otherwise look between {last} and the loss for detach(), torch.no_grad(), .data, .item(), "
        "round(), or a part of the model that the forward pass leaves out. If they are meant to stay fixed, give the "
        "optimizer only the others.",
        _NO_GRADIENT,
    ),
    Row(
        "no_gradient", partial(found, "gradient_without_optimizer"), "likely",
        "The parameters {params} get gradients but are in no optimizer, so they never change.",
        "Give {params} to the optimizer: the optimizer may have been constructed before these parameters, or these may "
        "be in a plain list, which should be an nn.ModuleList. If they are meant to stay fixed, call "
        "requires_grad_(False) on them.",
        may_be_meant=True,
    ),
    Row(
        "no_gradient", partial(found, "detached_layer"), "likely",
        "The parameters {params} have had no gradient since step {step}.",
        "If they were frozen at step {step} on purpose, do nothing. Otherwise find out what changed there: detach(), "
        "torch.no_grad(), requires_grad set to False, or a branch of the forward pass that leaves them out.",
        may_be_meant=True,
    ),
    Row(
        "rate_zero", loop.rate_zero, "certain",
        "The learning rate is 0: nothing is trained.",
        "Set lr above 0, such as 1e-3 for Adam or 0.1 for SGD. With a scheduler, check that its first factor is not 0 "
        "and that scheduler.step() is called.",
        "At a rate of 0 no gradient and no clip moves a weight.",
    ),
    Row(
        "rate_leapt", rate.leapt, "likely",
        "The loss broke down where the learning rate leapt up, at step {step}.",
        "Check the schedule at step {step} for a restart, a warm-up that ends too high, or a resumed scheduler.",
        "The data are not the cause: the loss follows the learning rate.",
    ),
    Row(
        "rate_decayed", rate.gone, "likely",
        "The learning rate was nearly 0 from step {step} on, while the loss was still falling: the loss stays at "
        "{loss}.",
        "Make the schedule as long as the run, {count} steps, so that the rate falls to a tenth after about two thirds "
        "of them. Check whether scheduler.step() is called once per step although the schedule counts epochs.",
        "The model and the data are not the cause: the loss fell until the rate was nearly 0.",
    ),
    *(
        Row(
            "raw_data", look, "likely",
            "The {which} are not normalised: their size is about {size}, and layers expect a size of about 1.",
            "Normalise the {which} to a mean of 0 and a standard deviation of 1 with the statistics of the training "
            "set, as in (x - mean) / std{pixels}. Choose the learning rate after that.",
            "The learning rate and the weights need not be the cause: none fits numbers of such a size.",
        )
        for look in (raw_data.inputs, raw_data.targets)
    ),
    Row(
        "raw_data", raw_data.flattening, "certain",
        "The inputs are not normalised: they are so large that the first activation is saturated for every sample.",
        "Normalise the inputs to a mean of 0 and a standard deviation of 1 with the statistics of the training set, as "
        "in (x - mean) / std. Choose the learning rate after that.",
        "No layer is detached: a saturated activation lets no gradient through.",
    ),
    Row(
        "bad_batches", bad_batches.bad_batches, "likely",
        "{which} very different from the others: {those}.",
        "Check the {there} for {where}.{clip}",
        "The learning rate is not the cause: the steps before each of these batches were calm.",
    ),
    Row(
        "exploding_time", depth.explodes_in_time, "likely",
        "Gradients explode through time: {params} multiplies them at each step of the sequence.",
        f"{_ORTHOGONAL}{{clip}}; shorter sequences help as well.",
        "No bad batch is the cause: the large norms come from the recurrent weight, not from all layers alike.",
    ),
    Row(
        "exploding_depth", depth.explodes_along_depth, "likely",
        "Gradients explode along the depth of the model: the weights of each layer are too large from the start.",
        "Initialise with smaller weights (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh), or put "
        "normalisation between the layers.",
        "No learning rate fits all layers while their gradients differ this much.",
    ),
    Row(
        "drift", bad_batches.grows_without_end, "likely",
        "Weights and gradients grow throughout the run, step by step, and {end}.",
        "Look for something that rewards large weights: a penalty or weight_decay with the wrong sign, a target that "
        "the model itself produces, or a loss without a lower bound. Normalisation layers or weight decay limit the "
        "growth.",
        "No single batch or step is the cause: nothing leapt before.",
    ),
    Row(
        "nonfinite_growth", partial(lost, "growth"), "likely", _GREW, "{advice}",
        "No bad sample and no bad operation is the cause: losses or norms had grown step by step before.",
    ),
    Row("nonfinite_growth", partial(lost, "leap"), "likely", _GREW, "{advice}"),
    Row(
        "update_rule", partial(found, "update_rule"), "likely",
        "The optimizer's steps are not what they should be: {message}.",
        "{advice}.",
        "The learning rate and the data need not be the cause: the steps are wrong whatever these are.",
    ),
    Row(
        "vanishing", depth.vanishes_along_depth, "likely",
        "Nothing is learnt below {edge}: gradients there are {share} of those above.",
        "Put residual connections or normalisation between the layers, and use ReLU or GELU in place of sigmoid or "
        "tanh, and an initialisation that preserves variances (torch.nn.init.kaiming_normal_, or xavier_normal_ for "
        "tanh).",
        "A higher learning rate does not help: the last layers would diverge before the first ones move.",
    ),
    Row(
        "vanishing", depth.vanishes_in_time, "likely",
        "Nothing is learnt across time: {params} lets hardly anything through from one step of a sequence to the next.",
        f"{_ORTHOGONAL}, whose gates let gradients through.",
        "A higher learning rate does not help: gradients are lost on their way back through the sequence.",
    ),
    Row(
        "data_shift", bad_batches.level_changes, "likely",
        "The data changed at step {step}: from one step to the next the loss moved to another level.",
        "Check what the data loader returns from step {step} on: another file, domain, length, normalisation or "
        "labelling, or one class only. If the change is intended, go on training; shuffle the parts together if both "
        "should be learned.",
        "The learning rate did not change, and the steps before were calm.",
    ),
    Row(
        "rate_too_low", rate.too_short, "likely",
        "The learning rate, {rate}, is too low: {end}.",
        "Multiply the learning rate by {factor}, to {better}, and run again.",
        "Gradients do not vanish: they are steady.",
    ),
    Row(
        "rate_too_high", rate.too_long, "likely",
        "The learning rate{rate} is too high: {end}.",
        "{advice}",
        "No bad batch is the cause: the loss does not return to its earlier level by itself.",
    ),
    Row(
        "not_started", loop.doubled, "certain",
        "The loss gets probabilities where it expects logits: {inner} is applied before the loss, and again inside it.",
        "Remove the {inner} before the loss: cross_entropy applies its own softmax, and "
        "binary_cross_entropy_with_logits its own sigmoid. Apply {inner} to predictions only.",
        "The learning rate need not be the cause: such a loss is nearly flat at every rate.",
    ),
    Row(
        "not_started", loop.zero_from_start, "likely",
        "Learning has not begun: the gradient of {params} is exactly 0 from the first step on.",
        "Initialise the weights at random (torch.nn layers do so by default), not with zeros or one constant; if they "
        "already are random, look for ReLUs that are dead from the start: biases far below 0, or inputs that are not "
        "normalised.",
        "The learning rate is an ordinary one.",
    ),
    Row(
        "not_started", loop.warming_up, "likely",
        "The warm-up is longer than the run: after {count} steps the learning rate, {rate}, is still rising.",
        "Shorten the warm-up to a tenth of the run, about {tenth} steps.",
        "The model need not be the cause: it has not trained at its full rate yet.",
    ),
    Row(
        "not_started", loop.stands_still, "likely",
        "Nothing has been learned in {count} steps, though gradients and learning rate are ordinary.",
        "Check that labels belong to their inputs (one may have been shuffled without the other), that inputs are "
        "normalised and reach the model, and that the loss gets what it expects (cross_entropy: logits, no softmax). "
        "If all of this is right, train longer, with a learning rate three times higher.",
        "The learning rate is an ordinary one.",
    ),
)  # fmt: skip
"""The causes in the order of precedence. First values that became non-finite at once, and faults of every gradient;
then parameters that are not trained, and the learning rate's schedule; then the data and the initial weights; last the
symptoms that any of these can produce."""

KEYS = (*dict.fromkeys(row.key for row in CAUSES), "healthy", "unknown")
"""Every key of a cause."""


def causes_of(signals: RunSignals) -> list[Cause]:
    """Return every cause that the table finds in a run, in the order of the table.

    Args:
        signals: The signals of the run.
    """
    shown: dict[str, Cause] = {}
    for row in CAUSES:
        sign = row.sign(signals)
        if sign is None:
            continue
        cause = row.cause(sign)
        if row.key not in shown or cause.doubt < shown[row.key].doubt:
            shown[row.key] = cause
    return list(shown.values())
