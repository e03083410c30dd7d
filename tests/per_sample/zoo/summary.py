"""Print what becomes of every model of the zoo: ``python tests/per_sample/zoo/summary.py --mode eval --only bert``."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402

from per_sample.zoo.case import MODES  # noqa: E402
from per_sample.zoo.expected import EXPECTED  # noqa: E402
from per_sample.zoo.table import CASES, as_expected, expectation, share_of_exact  # noqa: E402
from per_sample.zoo.trial import Outcome, trial  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, action="append", help="all, if none is given")
    parser.add_argument("--only", default="", help="a regular expression for names")
    parser.add_argument("--write", action="store_true", help="put what was found into expected.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    for mode in options.mode or MODES:
        for name, case in CASES.items():
            if mode not in case.modes or not re.search(options.only, name):
                continue
            found = trial(case, mode)
            counts[mode, found.kind] += 1
            flag = "  " if as_expected(found.kind, found.words, expectation(name, mode)) else "! "
            oracle = "" if found.oracle == "alone" else f"({found.oracle}) "
            numbers = f"{found.error:8.1e}{found.seconds:5.1f} s"
            print(f"{flag}{mode:9}{name:48}{found.kind:12}{numbers}  {oracle}{found.words}", flush=True)
            if options.write:
                learn(name, mode, found)
    for (mode, kind), count in sorted(counts.items()):
        print(f"{mode:9}{kind:12}{count:5}")
    for mode in options.mode or MODES:
        print(f"{mode:9}the table has {share_of_exact(mode):.1%} exact of the losses that are means over samples")
    if options.write:
        write()


def learn(name: str, mode: str, found: Outcome) -> None:
    """Take over an outcome as what is expected."""
    if as_expected(found.kind, found.words, expectation(name, mode)):
        return
    EXPECTED.setdefault(name, {})[mode] = found.kind if found.kind == "exact" else f"{found.kind}: {brief(found)}"


def brief(found: Outcome) -> str:
    """Words of an outcome that do not depend on sizes and rounding."""
    if found.kind == "wrong":
        return found.words.partition(", sample ")[0]
    if found.kind == "left behind":
        return found.words.partition(": ")[0]
    words = found.words.partition(": ")[2] if found.kind == "crash" else found.words
    clause = max(re.split(r"[\d()\[\]:;.,]", words[:200]), key=len).strip()
    return clause if len(clause) <= 70 else clause[:70].rpartition(" ")[0]


def write() -> None:
    """Write expected.py, in the order of the table."""
    file = Path(__file__).with_name("expected.py")
    head = file.read_text(encoding="utf-8").partition("EXPECTED")[0]
    rows = []
    for name, case in CASES.items():
        found = {mode: EXPECTED.get(name, {}).get(mode, "exact") for mode in case.modes}
        if set(found.values()) != {"exact"}:
            rows.append(f"    {json.dumps(name)}: {{")
            rows += [
                f"        {json.dumps(mode)}: {json.dumps(told)}," for mode, told in found.items() if told != "exact"
            ]
            rows.append("    },")
    text = "\n".join(["EXPECTED: dict[str, dict[str, str]] = {", *rows, "}", ""])
    file.write_text(head + text)


if __name__ == "__main__":
    main()
