"""What is said of every record at hand, word for word: before and after a change of the judgement.

python benchmarks/verdicts.py OUT.json [--records DIR ...] [--damaged 600] [--against BEFORE.json]

The records are those of the tests (each cause, each decision, each summary), 600 damaged ones of
`tests/monitoring/test_fuzzed_records.py`, and every ``run.jsonl`` below DIR, such as what `diagnosis.py --records DIR`
keeps. OUT.json holds diagnosis, decision and findings of each, as ``gradguard report --json`` has them. With
``--against`` the records whose words differ are printed, with the words; the exit code is 1 where a cause in first
place or a decision differs.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradguard.errors import RecordError
from gradguard.monitoring.record.file import Record, read_record
from gradguard.monitoring.show.report.json_summary import json_summary

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "monitoring")]


def of_tests(folder: Path) -> Iterator[tuple[str, Record]]:
    """The records that tests make up."""
    import test_diagnosis
    import test_json_summary
    import test_recommend
    from synthetic import write_char_rnn, write_gan, write_sick

    yield from ((f"cause: {name}", case[0]) for name, case in test_diagnosis.CASES.items())
    yield from ((f"decision: {name}", case[0]) for name, case in test_recommend.DECISIONS.items())
    for name, make in test_json_summary.RECORDS.items():
        (folder / name).mkdir()
        yield f"summary: {name}", make(folder / name)
    for write in (write_char_rnn, write_gan, write_sick):
        yield f"written: {write.__name__}", write(folder / f"{write.__name__}.jsonl")


def damaged(folder: Path, count: int) -> Iterator[tuple[str, Record]]:
    """Records with damaged fields, lines and bytes, as far as they can be read."""
    import test_fuzzed_records as fuzzed

    fuzzed.write_everything(folder / "everything.jsonl")
    fuzzed.write_char_rnn(folder / "char_rnn.jsonl", steps=260, threshold=0.5)
    fuzzed.write_sick(folder / "sick.jsonl", steps=60)
    fuzzed.write_gan(folder / "gan.jsonl", steps=50)
    sound = [path.read_bytes() for path in sorted(folder.iterdir())]
    for seed in range(count):
        path = folder / "damaged.jsonl"
        path.write_bytes(fuzzed.damaged(sound, random.Random(seed)))
        try:
            yield f"damaged: {seed}", read_record(path)
        except RecordError:
            continue


def kept(folders: list[Path]) -> Iterator[tuple[str, Record]]:
    """The records below some folders."""
    for folder in folders:
        for path in sorted(folder.rglob("run.jsonl")):
            yield f"kept: {path.parent.relative_to(folder)}", read_record(path)


def said_of(record: Record) -> dict[str, Any]:
    """Diagnosis, decision and findings, of the run and of each optimizer."""
    page = json.loads(json_summary([record]))
    own = {key: page[key] for key in ("diagnosis", "decision", "findings")}
    return own | {"optimizers": [[one["diagnosis"], one["decision"]] for one in page["optimizers"]]}


def differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two values of JSON differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before | after:
            yield from differences(before.get(key), after.get(key), f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for k, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{k}]")
    elif before != after:
        yield place, before, after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--records", type=Path, nargs="*", default=[])
    parser.add_argument("--damaged", type=int, default=600, help="how many damaged records")
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        sources = (of_tests(Path(first)), damaged(Path(second), options.damaged), kept(options.records))
        found = {name: said_of(record) for source in sources for name, record in source}
    options.out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} records")
    if options.against is None:
        return 0
    before, changed = json.loads(options.against.read_text()), 0
    for name in before.keys() & found.keys():
        for place, was, now in differences(before[name], found[name]):
            decides = place in (".diagnosis.cause", ".decision.kind", ".decision.threshold", ".decision.rate_factor")
            changed += decides
            print(f"{'! ' * decides}{name}{place}\n    - {json.dumps(was)}\n    + {json.dumps(now)}")
    print(f"{changed} causes in first place or decisions differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
