"""The words of the page that a newcomer may not know: explained where they stand, and in a list at its end."""

import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markupsafe import Markup


@dataclass(frozen=True)
class Term:
    """A word of the page.

    Attributes:
        name: As the list has it.
        forms: The words that stand for it in texts, as a regular expression.
        meaning: One or two plain sentences.
    """

    name: str
    forms: str
    meaning: str

    @property
    def id(self) -> str:
        """Return the anchor of a link to it."""
        return f"term-{self.name.replace(' ', '-')}"


TERMS = (
    Term("clip", r"clip(?:s|ped|ping)?", "To scale gradients down on steps where they are larger than a threshold."),
    Term("binds", r"binds?|bound", "A clip binds on a step when it changes the gradients there."),
    Term(
        "coefficient",
        r"coefficients?",
        "What the gradients of a step were multiplied by: 1 leaves them as they are, 0.1 makes them ten times smaller.",
    ),
    Term(
        "drift",
        r"drifts?|drifted",
        "The usual norm itself changes in the course of the run, so that no one threshold fits all of it.",
    ),
    Term(
        "heavy-tailed",
        r"heavy[- ]tail(?:s|ed)",
        "Norms several times the usual one are common, so that single large ones mean little.",
    ),
    Term("batch", r"batch(?:es)?", "The samples that one step learns from."),
    Term(
        "eps",
        r"eps",
        "A small number that Adam and its like add where they divide by the size of the gradients; gradients below it "
        "move hardly anything.",
    ),
    Term(
        "gradient",
        r"gradients?",
        "How the loss changes with each weight: the optimizer moves the weights against it.",
    ),
    Term("learning rate", r"learning rates?", "What the optimizer multiplies its steps by: how far each one goes."),
    Term(
        "recurrent weight",
        r"recurrent weights?",
        "The weight that a sequence runs through again at each of its steps.",
    ),
    Term("locked in", r"locked in", "A clip that binds on more than half of the last 100 steps at one threshold."),
    Term(
        "loss scale",
        r"loss scales?",
        "What a GradScaler multiplies the loss by, so that small gradients survive in float16; it takes it out again.",
    ),
    Term(
        "median",
        r"medians?",
        "The middle one of all values in order: half are smaller. A few extreme values do not move it.",
    ),
    Term(
        "moments",
        r"moments",
        "The running means of gradients and of their squares by which Adam and its like scale each step.",
    ),
    Term("non-finite", r"non-finite|not finite", "NaN or infinity: the computation overflowed or divided by zero."),
    Term(
        "norm",
        r"norms?",
        "The length of all gradients of a step as one vector: the square root of the sum of their squares. One number "
        "for how large they are.",
    ),
    Term(
        "normalising",
        r"normalis(?:es|ing)",
        "A clip that binds on more than half of the steps: it sets the size of nearly every step, as a learning rate "
        "does.",
    ),
    Term("guard", r"guards?", "A clip that binds on less than 5 % of the steps: it only stops rare large gradients."),
    Term("shaping", r"shap(?:es|ing)", "A clip that binds on 5 to 50 % of the steps."),
    Term("regime", r"regimes?", "How often a clip binds: never, as a guard, shaping, or normalising."),
    Term("outlier", r"outliers?", "A norm far above those around it."),
    Term("parameter", r"parameters?", "One tensor of weights that is trained, such as the weight or bias of a layer."),
    Term(
        "robust spread",
        r"robust (?:spread|deviations?)",
        "How far values usually lie from their median, measured so that a few extreme ones do not count.",
    ),
    Term(
        "spike",
        r"spikes?",
        "A norm that stands out from the 50 before and the 50 after it, by six of their robust deviations.",
    ),
    Term(
        "squared norm",
        r"squared norm",
        "The sum of the squares of all gradients. Squares add up, so each parameter has a share of it.",
    ),
    Term("optimizer step", r"optimizer steps?", "One update of the weights by the optimizer."),
    Term("threshold", r"thresholds?", "The norm above which a clip scales gradients down."),
    Term(
        "usable steps",
        r"usable steps?",
        "Steps whose norm says something about ordinary training: taken, finite, and after the warm-up.",
    ),
    Term("warm-up", r"warm-up", "The first steps, which are unlike the others: a tenth of a short run."),
    Term(
        "without feedback",
        r"without feedback",
        "Computed from the recorded norms alone: a run that had been clipped would have gone differently afterwards.",
    ),
)
# Not within a name such as encoder.norm.weight, nor an option such as --clip or norm=1.
_ANY = re.compile(
    r"(?<![\w.=/-])(?:"
    + "|".join(
        f"(?P<t{place}>{term.forms})" for place, term in sorted(enumerate(TERMS), key=lambda pair: -len(pair[1].forms))
    )
    + r")(?![\w=(/-]|\.\w)",
    re.IGNORECASE,
)


def explained(text: str) -> "Markup":
    """Link each word of the list, where it first comes in a text, to what it means.

    Args:
        text: Plain text.

    Returns:
        HTML in which everything else is escaped.

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
