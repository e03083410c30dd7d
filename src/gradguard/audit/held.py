"""Combine the gradients of all processes: recognise copies, and compute the true norm with each element once.

Everything here is plain numbers without processes, so that a test can simulate 64 of them. Values are checked before
attributes: a wrong attribute is a common cause of a wrong norm, and an audit that trusted it would inherit the error.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from itertools import chain
from typing import Literal

from gradguard.audit.audit_report import NormFinding
from gradguard.audit.factors import Candidates, Setting, candidates
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.tensors.sketch import SUMS

Claim = Literal["sharded", "replicated"]
Relation = Literal["same", "differ", "distinct", "unknown"]

APART = 0.3
"""Relative distance above which two pieces are unrelated; for unrelated ones it is about 1.4."""

DRIFTED = 1e-5
"""Relative distance above which weights are no longer copies; copies are equal to the last bit."""

_TELLING = 4  # gradients with fewer elements may be equal by chance

_TOLERANCES = {"float32": 1e-3, "float64": 1e-6}  # other dtypes have fewer digits, or are complex


@dataclass(frozen=True, slots=True)
class Sketch:
    """A summary of a tensor by a few numbers, enough to distinguish it from another tensor.

    Attributes:
        mean: The mean of the elements.
        spread: The norm of the elements minus their mean.
        sums: A sketch of the elements minus their mean, with the same norm. The distance between two sketches is
            close to the distance between the tensors.
    """

    mean: float = 0.0
    spread: float = 0.0
    sums: tuple[float, ...] = (0.0,) * SUMS

    def distance(self, other: "Sketch") -> float:
        """Return the distance between two tensors without their means, relative to the larger."""
        largest = max(self.spread, other.spread)
        return math.dist(self.sums, other.sums) / largest if largest else 0.0

    def is_close(self, other: "Sketch", tolerance: float) -> bool:
        """Tell whether both sketches can be of equal tensors."""
        size = max(abs(self.mean), abs(other.mean))
        return self.distance(other) <= tolerance and abs(self.mean - other.mean) <= tolerance * size + 1e-30


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """One process' part of one tensor.

    Attributes:
        names: The names of the parameter in the model; several if it is tied.
        numel: Number of elements of this piece.
        square: The sum of the squares of its gradient.
        gradient: The sketch of the gradient.
        weight: The sketch of the weight.
        dtype: The dtype of the gradient.
        group: The processes over which the layout shards the tensor; empty for an ordinary tensor.
        part: Index of this part in the layout.
        claim: Role of an ordinary tensor across processes by its attributes; None if they state none.
        index: The position among the pieces of this process.
        whole: Number of elements of all parts together, if the layout states it.
    """

    names: tuple[str, ...]
    numel: int
    square: float
    gradient: Sketch = field(default_factory=Sketch)
    weight: Sketch = field(default_factory=Sketch)
    dtype: str = "float32"
    group: tuple[int, ...] = ()
    part: int = 0
    claim: Claim | None = None
    index: int = 0
    whole: int | None = None

    def is_like(self, other: "HeldPiece") -> bool:
        """Tell whether both gradients can be copies: they differ by no more than the dtype's rounding."""
        return self.gradient.is_close(other.gradient, _TOLERANCES.get(other.dtype, 2e-2))


Holder = tuple[int, HeldPiece]
"""A rank, and a piece that the rank holds."""

Processes = Sequence[Sequence[HeldPiece]]
"""The pieces of each rank, by rank."""

Groups = Mapping[str, Claim]
"""The user's claims about ordinary tensors, by a pattern of their names: parts or copies across processes."""


@dataclass(slots=True)
class TensorPart:
    """One part of a tensor, and the ranks that hold it.

    Attributes:
        holders: The rank and the piece of each copy.
        differ: Whether the copies differ, although they should not.
        groups: The groups of processes over which layouts shard the tensor.
    """

    holders: list[Holder]
    differ: bool = False
    groups: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def first(self) -> HeldPiece:
        """The first copy."""
        return self.holders[0][1]

    @property
    def ranks(self) -> list[int]:
        """The ranks that hold a copy."""
        return [rank for rank, _ in self.holders]

    @property
    def square(self) -> float:
        """The sum of squares of the part's gradient; the mean over copies that differ."""
        return math.fsum(held.square for _, held in self.holders) / len(self.holders)

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return self.first.numel

    def join(self, other: "TensorPart", differ: bool = False) -> None:
        """Add the copies of ``other`` to this part.

        Args:
            other: Another part.
            differ: Whether it differs from this one.
        """
        self.holders += other.holders
        self.differ |= other.differ or differ
        self.groups |= other.groups


@dataclass(slots=True)
class Tensor:
    """One tensor of the model, combined from all processes.

    Attributes:
        names: Its names.
        parts: Its parts.
        unknown: Whether values do not show which pieces are copies.
        drift: Relative distance between the weights of copies, or of pieces that may be copies.
        contradiction: Why the role that a user or a layout declares cannot be right; empty if it can.
    """

    names: tuple[str, ...]
    parts: list[TensorPart]
    unknown: bool = False
    drift: float = 0.0
    contradiction: str = ""

    @property
    def name(self) -> str:
        """The names of a tied tensor joined by ``=``, or its only name."""
        return " = ".join(self.names)

    @property
    def holders(self) -> list[Holder]:
        """All pieces of the tensor, each with its rank."""
        return [holder for part in self.parts for holder in part.holders]

    @property
    def square(self) -> float:
        """The sum of squares of the tensor's gradient, each element once."""
        return math.fsum(part.square for part in self.parts)

    @property
    def numel(self) -> int:
        """Number of elements, each once."""
        return sum(part.numel for part in self.parts)

    @property
    def copies(self) -> int:
        """Number of processes that hold each part; the maximum if parts differ."""
        return max(len(part.holders) for part in self.parts)

    @property
    def ranks(self) -> set[int]:
        """The ranks that hold a part or a copy of the tensor."""
        return {rank for rank, _ in self.holders}

    def counts(self, setting: Setting) -> Candidates:
        """Return the counts that known mistakes would give this tensor, each with its explanations."""
        return candidates(setting, self.copies, len(self.parts), len(self.names))

    @property
    def layout(self) -> str:
        """The tensor's layout over the processes, in words; equal within a class."""
        split = f"in {len(self.parts)} parts" if len(self.parts) > 1 else ""
        copied = f"replicated on {self.copies} processes" if self.copies > 1 else ""
        tied = f"tied under {len(self.names)} names" if len(self.names) > 1 else ""
        return ", ".join(filter(None, [split, copied, tied])) or "held whole by one process"


Tensors = Sequence[Tensor]


def tensors_of(processes: Processes, groups: Groups | None = None) -> list[Tensor]:
    """Combine the pieces of all processes into tensors, recognising copies by their values.

    Args:
        processes: The pieces of each rank, by rank.
        groups: The user's claims about ordinary tensors, which decide where values do not.

    Returns:
        The tensors of the model, in the order of the first process that holds them.
    """
    by_name: dict[tuple[str, ...], list[Holder]] = {}
    for rank, pieces in enumerate(processes):
        for held in pieces:
            by_name.setdefault(held.names, []).append((rank, held))
    return _tied([_together(names, pieces, _said(names, groups)) for names, pieces in by_name.items()])


def check_groups(groups: Groups | None, tensors: Tensors) -> None:
    """Refuse patterns that match nothing or contradict each other, which a typing error would otherwise hide."""
    names = [name for tensor in tensors for name in tensor.names]
    if unknown := [one for one in groups or {} if not any(fnmatchcase(name, one) for name in names)]:
        raise InvalidValueError(
            f"groups: {unknown} matches no parameter with a gradient: expected patterns of names such as {names[0]!r}."
        )
    for tensor in tensors:
        said = {claim: one for one, claim in (groups or {}).items() if _said(tensor.names, {one: claim})}
        if len(said) > 1:
            both = " and ".join(f"{pattern!r} is {claim!r}" for claim, pattern in said.items())
            raise InvalidValueError(f"groups: {both}, and {tensor.names[0]} matches both: expected one of them for it.")


def check_whole(processes: Processes) -> None:
    """Refuse a layout whose parts do not add up to the number of elements that it states."""
    held: Counter[tuple] = Counter()
    for one in chain(*processes):
        if one.whole is not None:
            held[one.names, one.group, one.whole] += one.numel
    for (names, _, whole), numel in held.items():
        if numel != whole:
            raise UnsupportedGradientError(
                f"the parts of the gradient of {names[0]} have {numel} elements on all processes: expected {whole}, "
                "each once. The pieces that the engine holds do not form one gradient, so no true norm can be computed."
            )


def with_claims(groups: Groups | None, wanted: Tensors, tensors: Tensors) -> dict[str, Claim] | None:
    """Return ``groups`` with every tensor of ``wanted`` that it does not mention added as sharded; None if none is.

    Tensors whose names differ by a number between two dots, as experts do, share one pattern if it matches no other.
    """
    names = {name for tensor in wanted if not _said(tensor.names, groups) for name in tensor.names}
    others = {name for tensor in tensors for name in tensor.names} - names
    added: dict[str, Claim] = {}
    for name in sorted(names):
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", escape(name))
        added[escape(name) if any(fnmatchcase(one, pattern) for one in others) else pattern] = "sharded"
    return {**(groups or {}), **added} if added else None


def _said(names: Iterable[str], groups: Groups | None) -> Claim | None:
    return next((said for pattern, said in (groups or {}).items() for n in names if fnmatchcase(n, pattern)), None)


def _together(names: tuple[str, ...], pieces: Sequence[Holder], said: Claim | None) -> Tensor:
    """Return the tensor of these pieces: join copies by their layout first, then by their values."""
    claimed: dict[tuple, list[Holder]] = {}
    for rank, held in pieces:
        claimed.setdefault((held.group or (rank,), held.part), []).append((rank, held))
    tensor = Tensor(names, [])
    for (group, _), holders in claimed.items():
        first = holders[0][1]
        part = TensorPart(holders, not all(h.is_like(first) for _, h in holders), {group})
        tensor.drift = max(tensor.drift, *(drift(first, h) for _, h in holders))
        for known in tensor.parts:
            is_one_layout = group in known.groups
            # Parts of one layout are distinct, unless their values show that it shards nothing.
            found = "distinct" if is_one_layout else relation(known.first, first, said)
            if not is_one_layout or known is tensor.parts[0]:
                claim = "sharded" if is_one_layout else said
                tensor.contradiction = tensor.contradiction or contradiction(known.first, first, claim)
            tensor.unknown |= found == "unknown" or bool(tensor.contradiction)
            if found == "distinct":
                continue
            tensor.drift = max(tensor.drift, drift(known.first, first))
            if found != "unknown":
                known.join(part, found == "differ")
                break
        else:
            tensor.parts.append(part)
    return tensor


def relation(one: HeldPiece, other: HeldPiece, said: Claim | None = None) -> Relation:
    """Tell whether two pieces of one name, on different processes, are copies or parts.

    Weights decide where they are not constant: copies have equal weights, parts do not. Where weights are constant, as
    those of biases and norms are at first, gradients decide. Attributes decide only where neither does.

    Args:
        one: A piece.
        other: Another one.
        said: The user's claim, which overrides the values, but not unequal sizes.

    Returns:
        ``"same"`` for copies that are equal, ``"differ"`` for copies that are not, ``"distinct"`` for two parts, else
        ``"unknown"``.
    """
    is_claimed = "sharded" in (one.claim, other.claim)
    alike = other.is_like(one)
    if said == "sharded" or one.numel != other.numel:
        return "distinct"
    if not one.numel:
        return "same"
    if said == "replicated":
        return "same" if alike else "differ"
    if not one.weight.is_close(other.weight, APART):
        return "distinct"
    if one.weight.spread > 0 and one.weight.is_close(other.weight, 1e-6):
        if alike:
            return "same"
        return "unknown" if is_claimed else "differ"
    if not alike:
        return "distinct" if is_claimed else "unknown"
    scalar = one.numel == 1 and not is_claimed
    tells = one.square > 0 and (one.gradient.spread > 0 or scalar)
    return "same" if tells else "unknown"


def contradiction(one: HeldPiece, other: HeldPiece, said: Claim | None) -> str:
    """Return the reason why a claim about two pieces of one name cannot be right; empty if it can.

    Args:
        one: A piece.
        other: Another one.
        said: The claim of a user or of a layout.
    """
    if said == "replicated" and one.numel != other.numel:
        return f"processes hold {one.numel:,} and {other.numel:,} elements"
    if said == "replicated" and one.weight.distance(other.weight) >= APART:
        return "weights differ as only those of parts do"
    equal = one.numel == other.numel >= _TELLING and one.square > 0 and one.weight.is_close(other.weight, 1e-6)
    if said == "sharded" and equal and relation(one, other) == "same":
        constant = one.weight.spread == 0
        return "gradients are equal, and weights constant" if constant else "weights and gradients are equal"
    return ""


def contradictions(tensors: Tensors) -> list[NormFinding]:
    """Return a finding for each reason why declared roles of tensors cannot be right."""
    found = []
    for why in dict.fromkeys(tensor.contradiction for tensor in tensors if tensor.contradiction):
        said, are = ("parts", "copies") if "equal" in why else ("copies", "parts")
        what = (
            f"declared as {said}, but their values are those of {are}: {why}. Remove them from groups, or correct "
            "their layout"
        )
        found.append(NormFinding("claim", what, tuple(t.name for t in tensors if t.contradiction == why)))
    return found


def drift(one: HeldPiece, other: HeldPiece) -> float:
    """Return the distance between two weights of one size, relative to the larger; 0 for copies."""
    size = max(math.hypot(h.weight.spread, h.weight.mean * math.sqrt(h.numel)) for h in (one, other))
    apart = one.weight.distance(other.weight) * max(one.weight.spread, other.weight.spread)
    apart = math.hypot(apart, (one.weight.mean - other.weight.mean) * math.sqrt(one.numel))
    return apart / size if size else 0.0


def _tied(tensors: list[Tensor]) -> list[Tensor]:
    """Join tensors of two names that are one tensor: no process holds both, and weights and gradients are equal."""
    found: list[Tensor] = []
    by_size: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        alike = by_size.setdefault(tuple(part.numel for part in tensor.parts), [])
        one = next((one for one in alike if not one.ranks & tensor.ranks and _are_one(one, tensor)), None)
        if one is None:
            alike.append(tensor)
            found.append(tensor)
            continue
        one.names += tensor.names
        for mine, theirs in zip(one.parts, tensor.parts, strict=True):
            mine.join(theirs)
        one.drift = max(one.drift, tensor.drift)
    return found


def _are_one(one: Tensor, other: Tensor) -> bool:
    pairs = [(a.first, b.first) for a, b in zip(one.parts, other.parts, strict=True)]
    return not (one.unknown or other.unknown) and all(
        a.numel > 1 and a.weight.spread > 0 and a.gradient.spread > 0
        and a.weight.is_close(b.weight, 1e-6) and b.is_like(a)
        for a, b in pairs
    )  # fmt: skip


def true_norm(tensors: Tensors) -> float:
    """Return the 2-norm of all gradients, each element once; NaN if values do not show which are copies."""
    if any(tensor.unknown and tensor.square > 0 for tensor in tensors):
        return math.nan
    return math.sqrt(math.fsum(tensor.square for tensor in tensors))
