"""Explain the page's technical terms to newcomers: in tooltips, and in a list at the end of the page."""

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Term:
    """A technical term of the page.

    Attributes:
        name: The term in the list.
        forms: A regular expression for the forms of the term in texts.
        meaning: One or two plain sentences.
    """

    name: str
    forms: str
    meaning: str

    @property
    def id(self) -> str:
        """Return the anchor of the term in the list."""
        return f"term-{self.name.replace(' ', '-')}"


TERMS = (
    Term("clip", r"clip(?:s|ped|ping)?", "To scale gradients down on steps on which they exceed a threshold."),
    Term("binds", r"binds?|bound", "A clip binds on a step if it changes the gradients of that step."),
    Term(
        "coefficient",
        r"coefficients?",
        "The factor that a step's gradients were multiplied by: 1 leaves them unchanged, 0.1 makes them ten times "
        "smaller.",
    ),
    Term(
        "drift",
        r"drifts?|drifted",
        "The usual norm changes during the run. No single threshold then fits the whole run.",
    ),
    Term(
        "heavy-tailed",
        r"heavy[- ]tail(?:s|ed)",
        "Norms of several times the usual norm are common. A single large norm then means little.",
    ),
    Term("batch", r"batch(?:es)?", "The samples that one step learns from."),
    Term(
        "eps",
        r"eps",
        "A small number that Adam and similar optimizers add to the divisor of their step. Gradients below it hardly "
        "move the weights.",
    ),
    Term(
        "gradient",
        r"gradients?",
        "The change of the loss per change of each weight. The optimizer moves the weights in the opposite direction.",
    ),
    Term("learning rate", r"learning rates?", "The factor that the optimizer multiplies its steps by."),
    Term(
        "recurrent weight",
        r"recurrent weights?",
        "A weight that is applied again at each position of a sequence.",
    ),
    Term("locked in", r"locked in", "A clip that binds on more than half of the last 100 steps at one threshold."),
    Term(
        "loss scale",
        r"loss scales?",
        "The factor that a GradScaler multiplies the loss by: small gradients then survive in float16. The GradScaler "
        "divides the gradients by it again before the step.",
    ),
    Term(
        "median",
        r"medians?",
        "The middle of all values in order: half of them are smaller. A few extreme values do not change it.",
    ),
    Term(
        "moments",
        r"moments",
        "The running means of the gradients and of their squares. Adam and similar optimizers scale each step by them.",
    ),
    Term("non-finite", r"non-finite|not finite", "NaN or infinity: the computation overflowed or divided by zero."),
    Term(
        "norm",
        r"norms?",
        "The length of all gradients of a step as one vector: the square root of the sum of their squares.",
    ),
    Term(
        "normalising",
        r"normalis(?:es|ing)",
        "A clip that binds on more than half of the steps. It then determines the size of nearly every step, like a "
        "learning rate.",
    ),
    Term("guard", r"guards?", "A clip that binds on less than 5 % of the steps: it stops only rare large gradients."),
    Term("shaping", r"shap(?:es|ing)", "A clip that binds on 5 to 50 % of the steps."),
    Term("regime", r"regimes?", "How often a clip binds: never, as a guard, shaping, or normalising."),
    Term("outlier", r"outliers?", "A norm far above the norms around it."),
    Term("parameter", r"parameters?", "One trained tensor of weights, such as the weight or bias of a layer."),
    Term(
        "robust spread",
        r"robust (?:spread|deviations?)",
        "The usual distance of values from their median, computed in a way that ignores a few extreme values.",
    ),
    Term(
        "spike",
        r"spikes?",
        "A norm whose logarithm exceeds the median logarithm of the norms around it, 50 before and 50 after, by six "
        "robust deviations.",
    ),
    Term(
        "squared norm",
        r"squared norm",
        "The sum of the squares of all gradients. Squares add up, so each parameter has a share of the sum.",
    ),
    Term("optimizer step", r"optimizer steps?", "One update of the weights by the optimizer."),
    Term("threshold", r"thresholds?", "The norm above which a clip scales gradients down."),
    Term(
        "usable steps",
        r"usable steps?",
        "Steps whose norm represents ordinary training: the optimizer took them, their gradients were finite, and the "
        "warm-up was over.",
    ),
    Term("warm-up", r"warm-up", "The first steps, which differ from the others: a tenth of a short run."),
    Term(
        "without feedback",
        r"without feedback",
        "Computed from the recorded norms alone. With the clip, the run would have had other norms afterwards.",
    ),
)
# Match neither inside a name such as encoder.norm.weight, nor in an option such as --clip or norm=1.
_ANY = re.compile(
    r"(?<![\w.=/-])(?:"
    + "|".join(
        f"(?P<t{place}>{term.forms})" for place, term in sorted(enumerate(TERMS), key=lambda pair: -len(pair[1].forms))
    )
    + r")(?![\w=(/-]|\.\w)",
    re.IGNORECASE,
)


def explained(text: str) -> "Markup":
    """Link the first occurrence of each term in a text to its meaning.

    Args:
        text: Plain text.

    Returns:
        HTML with these links; everything else is escaped.

    Example:
        >>> print(explained("2 < 3 drifts of <encoder.norm>"))
        2 &lt; 3 <a class="term" href="#term-drift">drifts</a> of &lt;encoder.norm&gt;
    """
    from markupsafe import Markup

    seen: set[str] = set()
    pieces, end = [], 0
    for found in _ANY.finditer(text):
        term = TERMS[int((found.lastgroup or "t0")[1:])]
        if term.id not in seen:
            seen.add(term.id)
            link = f'<a class="term" href="#{term.id}">{html.escape(found[0])}</a>'
            pieces += [html.escape(text[end : found.start()]), link]
            end = found.end()
    return Markup("".join([*pieces, html.escape(text[end:])]))
