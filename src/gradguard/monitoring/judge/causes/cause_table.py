"""The causes that a run can suffer from, one under the other: the evidence, the words, the advice, and who leads.

Of two causes that are as sure, the one that stands first leads. So it does of two rows of one cause.
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
"""The causes that a first cause excludes where it says so (`Cause.rules_out`): none of them is listed behind it."""

_NOT_FINITE = (
    "At step {step} the loss or a gradient became NaN or infinite, and nothing had grown before: it comes from the "
    "batch or an operation on it."
)
_FIND_NAN = (
    "Look at the batch of step {step} for NaN, infinity, an empty or corrupt sample, and for a logarithm, root or "
    "division of 0: `gradguard explain nan` finds the sample, the operation and its line. To leave such steps out "
    'until then, use gg.Guard(optimizer, gg.ClipByMedian(), nonfinite="skip").'
)
_NOT_GROWN = "Neither a lower learning rate nor a clip keeps this away: nothing had grown before."
_FLOAT16 = "A number left the range of float16, above 65,504, at step {step}{learned}."
_GREW = "Losses and gradients grew until they became NaN or infinite at step {step}."
_USUAL_BEFORE = "The learning rate is not the cause: losses and norms were at their usual level before."
_CLIPPED_SCALED = (
    "Gradients are clipped while they are still multiplied by the loss scale, so that the threshold means nothing."
)
_UNSCALE = "Call scaler.unscale_(optimizer) before the clip."
_COMPARED_SCALED = "The threshold itself may be right: it is compared with norms that are thousands of times too large."
_IDLE = "The optimizer stepped {steps} times and none of its parameters ever had a gradient: nothing is trained."
_NOTHING_CHANGES = "No learning rate and no clip changes anything here."
_NO_GRADIENT = "No learning rate and no clip changes what has no gradient."
_ORTHOGONAL = "Initialise the recurrent weight with torch.nn.init.orthogonal_, or use an LSTM or GRU"

CAUSES = (
    *(
        Row("nonfinite_data", partial(lost, by), certainty, _NOT_FINITE, _FIND_NAN, _NOT_GROWN)
        for by, certainty in (("data", "certain"), ("batch", "likely"))
    ),
    Row(
        "nonfinite_range", partial(lost, "small type"), "likely", _FLOAT16,
        "Use bfloat16 in place of float16, which has the range of float32; or compute what overflows in float32: "
        "the logits and the loss with .float(), inside torch.autocast(enabled=False). If the batch of step {step} is "
        "not finite in float32 either, it is the batch: look there for an empty row or a division by 0.",
        _USUAL_BEFORE,
    ),
    Row(
        "nonfinite_range", partial(lost, "exponential"), "likely",
        "An exponential left the range of float32 at step {step}{learned}.",
        "Compute it in a stable form: torch.logsumexp, log_softmax, softplus or cross_entropy in place of exp, or "
        "subtract the largest value before exp. If it is stable, the batch of step {step} is unlike the others.",
        _USUAL_BEFORE,
    ),
    Row(
        "nonfinite_range", nonfinite_values.scale_collapses, "likely",
        "Gradients overflow float16 whatever the loss scale is, so that steps are skipped one after the other.",
        "Use bfloat16 in place of float16 and no GradScaler; if numbers are not finite then either, "
        "`gradguard explain nan` finds the operation.",
    ),
    *(
        Row("clip_before_unscale", look, "certain", _CLIPPED_SCALED, _UNSCALE, _COMPARED_SCALED)
        for look in (partial(found, "clip_before_unscale"), loop.norms_follow_scale)
    ),
    Row(
        "clip_twice", clip_faults.clips_twice, "likely",
        "Gradients are clipped {count} times for each step: the later clip sees what the earlier one has left.",
        "Keep {clip} or the other, and take away the one that binds on most steps.",
    ),
    Row(
        "clip_starves", clip_faults.starves_below_eps, "certain",
        "{clip} starves the optimizer: gradients below its eps, {eps}, hardly move a weight.",
        "{advice}",
        "An optimizer that divides by the size of the gradients cancels a clip only above its eps.",
    ),
    Row(
        "clip_starves", clip_faults.starves_rate, "likely",
        "{clip} starves the optimizer: it multiplies the learning rate by {coefficient}.",
        "{advice}",
        "The learning rate that the script sets is not the one that acts: the clip sets it.",
    ),
    Row(
        "clip_starves", clip_faults.starves_unseen, "likely",
        "Something that was not seen scales gradients to a norm of {norm}, and such steps hardly move a weight.",
        "Look between backward() and step() for what multiplies or divides p.grad, and take it away, or raise its "
        "threshold a hundredfold and look again.",
        "The learning rate that the script sets is not the one that acts: the scale sets it.",
    ),
    Row(
        "accumulation", partial(found, "missing_zero_grad"), "certain",
        "Gradients are never cleared: each step follows the sum of all gradients so far.",
        "Call optimizer.zero_grad() once for each step, before its first backward().",
        "The learning rate may be right: no threshold and no rate can be read from such norms.",
    ),
    Row(
        "accumulation", loop.summed_micro_batches, "certain",
        "Gradients of {count} micro-batches are summed for each step, which makes the learning rate {count} times "
        "what it says.",
        "Divide the loss by {count} before backward(), as in (loss / {count}).backward().",
    ),
    Row(
        "no_gradient",
        partial(
            idle,
            "Gradients are there after backward() and gone at step(): zero_grad() is called between the two.",
            lambda signals: any("order" in parameter for parameter in signals.params),
        ),
        "certain", _IDLE,
        "Call optimizer.zero_grad() before backward(), or after optimizer.step(), and not between the two.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient",
        partial(
            idle,
            "The backward pass reaches {leaves} tensors, and none of them is one of the optimizer's.",
            lambda signals: bool(signals.leaves),
        ),
        "certain", _IDLE,
        "Make the optimizer from the parameters of the very model that computes the loss: not of a copy, and not "
        "before the model was made anew, moved or wrapped.",
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
        "Look between the model's output and the loss for detach(), .data, .item(), torch.no_grad(), or a tensor that "
        "was made anew from numbers, and take it away.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", partial(idle, "{message}.", lambda signals: True), "certain", _IDLE, "{advice}.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", loop.all_zero, "certain",
        "Every gradient is exactly 0 on every step: nothing is trained.",
        "Check that zero_grad() does not come between backward() and step(), and that the loss is computed from the "
        "model's output without detach(), round(), argmax() or a comparison on the way.",
        _NOTHING_CHANGES,
    ),
    Row(
        "no_gradient", loop.replaced, "likely",
        "The optimizer holds {old}, which never get a gradient, and not {new}, which do.",
        "Make the optimizer after the last part of the model was replaced, from the parameters that the forward uses. "
        "If none was replaced, {new} perhaps stand in a plain list, where nn.ModuleList is missing.",
        _NO_GRADIENT,
    ),
    Row(
        "no_gradient", loop.frozen, "likely",
        "{count} of {all} parameters are frozen, {rest}.",
        "If they are to be trained, set requires_grad_(True) on them before the first forward; if not, give the "
        "optimizer the others only.",
        _NO_GRADIENT, may_be_meant=True,
    ),
    Row(
        "no_gradient", loop.cut_off, "likely",
        "{count} of {all} parameters never get a gradient{where}, and stay as they began.",
        "If a part of the model was replaced after the optimizer was made, make the optimizer anew: it holds the old "
        "part. Else look between {last} and the loss for detach(), torch.no_grad(), .data, .item(), round(), or a part "
        "of the model that the forward leaves out. If they are meant to stay as they are, give the optimizer the "
        "others only.",
        _NO_GRADIENT,
    ),
    Row(
        "no_gradient", partial(found, "gradient_without_optimizer"), "likely",
        "The parameters {params} get gradients and are in no optimizer, so that they never change.",
        "Give {params} to the optimizer: it was perhaps made before they were, or they stand in a plain list, where "
        "nn.ModuleList is missing. If they are meant to stay as they are, call requires_grad_(False) on them.",
        may_be_meant=True,
    ),
    Row(
        "no_gradient", partial(found, "detached_layer"), "likely",
        "The parameters {params} get no gradient any more since step {step}.",
        "If they were frozen at step {step} on purpose, nothing is to be done. Else look at what changed there: "
        "detach(), torch.no_grad(), requires_grad set to False, or a branch of the forward that leaves them out.",
        may_be_meant=True,
    ),
    Row(
        "rate_zero", loop.rate_zero, "certain",
        "The learning rate is 0: nothing is trained.",
        "Set lr above 0, such as 1e-3 for Adam or 0.1 for SGD. With a scheduler, check that its first factor is not 0 "
        "and that scheduler.step() is called.",
        "No gradient and no clip changes a weight at a rate of 0.",
    ),
    Row(
        "rate_leapt", rate.leapt, "likely",
        "The loss broke where the learning rate leapt up, at step {step}.",
        "Look at the schedule at step {step}: a restart, a warm-up that ends too high, or a resumed scheduler.",
        "The data are not the cause: the loss follows the learning rate.",
    ),
    Row(
        "rate_decayed", rate.gone, "likely",
        "The learning rate was nearly 0 from step {step} on, while the loss was still falling: it stays at {loss}.",
        "Let the schedule end with the run: make its length {count} steps, so that the rate falls to a tenth at about "
        "two thirds of them. Check whether scheduler.step() is called once for each step where once for each epoch is "
        "meant.",
        "The model and the data are not the cause: the loss fell as long as there was a rate.",
    ),
    *(
        Row(
            "raw_data", look, "likely",
            "The {which} are not normalised: their size is about {size}, and layers are made for 1.",
            "Bring the {which} to a mean of 0 and a spread of 1 with the numbers of the training set, as in (x - mean) "
            "/ std{pixels}. Choose the learning rate after that.",
            "Learning rate and weights need not be the cause: none fits numbers of such a size.",
        )
        for look in (raw_data.inputs, raw_data.targets)
    ),
    Row(
        "raw_data", raw_data.flattening, "certain",
        "The inputs are not normalised: they are so large that the first activation is at its limit for every sample.",
        "Bring the inputs to a mean of 0 and a spread of 1 with the numbers of the training set, as in (x - mean) / "
        "std. Choose the learning rate after that.",
        "Nothing is cut off: an activation at its limit lets no gradient through.",
    ),
    Row(
        "bad_batches", bad_batches.bad_batches, "likely",
        "{which} far unlike the others: {those}.",
        "Look at the batches, {those}, for {where}.{clip}",
        "The learning rate is not the cause: the steps before each of these were calm.",
    ),
    Row(
        "exploding_time", depth.explodes_in_time, "likely",
        "Gradients explode through time: {params} multiplies them at each step of the sequence.",
        f"{_ORTHOGONAL}{{clip}}; shorter sequences help as well.",
        "It is no bad batch: large norms come from the recurrent weight and not from all layers alike.",
    ),
    Row(
        "exploding_depth", depth.explodes_along_depth, "likely",
        "Gradients explode along the depth of the model: the weights of each layer are too large from the start.",
        "Initialise with smaller weights (torch.nn.init.kaiming_normal_ for ReLU, xavier_normal_ for tanh), or put "
        "normalisation layers between.",
        "No learning rate fits all layers as long as their gradients differ so.",
    ),
    Row(
        "drift", bad_batches.grows_without_end, "likely",
        "Weights and gradients grow all through the run, step by step, and {end}.",
        "Look for what rewards large weights: the sign of a penalty or of weight_decay, a target made by the model "
        "itself, or a loss without a lower bound. Normalisation layers or weight decay bound their growth.",
        "It is no single batch and no single step: nothing leapt before.",
    ),
    Row(
        "nonfinite_growth", partial(lost, "growth"), "likely", _GREW, "{advice}",
        "It is no bad sample and no bad operation: numbers grew step by step before.",
    ),
    Row("nonfinite_growth", partial(lost, "leap"), "likely", _GREW, "{advice}"),
    Row(
        "update_rule", partial(found, "update_rule"), "likely",
        "The optimizer's steps are not what its rule should make of the gradients: {message}.",
        "{advice}.",
        "The learning rate and the data need not be the cause: a step is wrong whatever they are.",
    ),
    Row(
        "vanishing", depth.vanishes_along_depth, "likely",
        "Nothing is learnt below {edge}: gradients there are {share} of those above.",
        "Keep gradients alive along depth: residual connections or normalisation between layers, ReLU or GELU in place "
        "of sigmoid or tanh, and an initialisation that keeps variances (torch.nn.init.kaiming_normal_, or "
        "xavier_normal_ for tanh).",
        "A higher learning rate does not help: the last layers would diverge before the first ones move.",
    ),
    Row(
        "vanishing", depth.vanishes_in_time, "likely",
        "Nothing is learnt over time: {params} lets hardly anything through from one step of a sequence to the next.",
        f"{_ORTHOGONAL}, whose gates let gradients through.",
        "A higher learning rate does not help: gradients are lost on their way through the sequence.",
    ),
    Row(
        "data_shift", bad_batches.level_changes, "likely",
        "The data changed at step {step}: from one step to the next the loss went to another level.",
        "Look at what the loader gives from step {step} on: another file, domain, length, normalisation or "
        "labelling, or one class only. If that is meant, go on training; shuffle the parts together if both are to "
        "be learned.",
        "The learning rate did not change, and the steps before were calm.",
    ),
    Row(
        "rate_too_low", rate.too_short, "likely",
        "The learning rate, {rate}, is too low: {end}.",
        "Multiply the learning rate by {factor}, to {better}, and look again.",
        "Gradients are steady: they do not vanish.",
    ),
    Row(
        "rate_too_high", rate.too_long, "likely",
        "The learning rate{rate} is too high: {end}.",
        "{advice}",
        "It is no bad batch: the loss does not come back by itself to where it was.",
    ),
    Row(
        "not_started", loop.doubled, "certain",
        "The loss takes probabilities for scores: {inner} is applied before it, and once more within it.",
        "Take the {inner} away from what the loss is given: cross_entropy takes its own softmax, and "
        "binary_cross_entropy_with_logits its own sigmoid. Apply it to predictions alone.",
        "The learning rate need not be the cause: such a loss is nearly flat, whatever it is.",
    ),
    Row(
        "not_started", loop.zero_from_start, "likely",
        "Nothing has begun to learn: the gradient of {params} is exactly 0 from the first step on.",
        "Initialise the weights at random (the default of torch.nn layers does), not with zeros or one constant; if "
        "they are, look for ReLUs that are dead from the start: biases far below 0, or inputs that are not "
        "normalised.",
        "The learning rate is an ordinary one.",
    ),
    Row(
        "not_started", loop.warming_up, "likely",
        "The warm-up is longer than the run: after {count} steps the learning rate still rises, at {rate}.",
        "Shorten the warm-up to a tenth of the run, some {tenth} steps.",
        "The model need not be the cause: it has not seen its full rate yet.",
    ),
    Row(
        "not_started", loop.stands_still, "likely",
        "Nothing has been learned in {count} steps, though gradients and learning rate are ordinary.",
        "Check that labels belong to their inputs (a shuffle of one and not of the other), that inputs are normalised "
        "and reach the model, and that the loss gets what it expects (cross_entropy: logits, no softmax). If they are "
        "right, train longer, with a learning rate three times higher.",
        "The learning rate is an ordinary one.",
    ),
)  # fmt: skip
"""First numbers that were lost at once, and what is done to every gradient; then what is not trained, and what the rate
did; then the data and the weights of the start; and last what any of these can make of a run."""

KEYS = (*dict.fromkeys(row.key for row in CAUSES), "healthy", "unknown")
"""Every key of a cause."""


def causes_of(signals: RunSignals) -> list[Cause]:
    """Return every cause whose sign shows in a run, in the order of the table.

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
