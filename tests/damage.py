"""Damage files of plain data: flip bits, cut them short, put values of other kinds and sizes into their header."""

import json
import struct

NASTY = [
    None, True, 0, -1, 1, 7, 2**53, 10**30, 10**400, 1e308, 5e-324, float("nan"), float("inf"), -1.0, "", "x",
    "\x1b[2J", [], [[]], [-1], [3 * 10**8, 0, 0], [2**40, 2**40], {}, {"a": 1}, [1, 2, 3], {"tensor": 0}, {"tuple": []},
]  # fmt: skip
NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.0, -0.0]
DEEP = json.loads("[" * 900 + "]" * 900)


def places(value, path=()):
    """Return the paths to all values inside a value, the whole first."""
    yield path
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(one, (*path, key))


def mutated(told, rng):
    """Return a copy in which one value is replaced, removed, or duplicated."""
    told = json.loads(json.dumps(told))
    *path, last = rng.choice([path for path in places(told) if path])
    holder = told
    for key in path:
        holder = holder[key]
    way = rng.random()
    if way < 0.2:
        del holder[last]
    elif way < 0.3 and isinstance(holder, dict):
        holder["more"] = holder[last]
    else:
        holder[last] = DEEP if way > 0.98 else rng.choice(NASTY)
    return told


def damaged(whole, key, rng, checksum=None):
    """Return the bytes of a file of blocks, damaged in one of several ways.

    Args:
        whole: The file.
        key: The key of the text in its header that describes the blocks.
        rng: Draws the damage.
        checksum: Computes the texts beside it, so that a change of the description is not refused by its checksum.
    """
    begin, way = 8 + int.from_bytes(whole[:8], "little"), rng.random()
    if way < 0.15:
        flipped = bytearray(whole)
        for _ in range(rng.choice([1, 3, 20])):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if way < 0.25:
        return whole[: rng.randrange(len(whole))]
    header, data = json.loads(whole[8:begin]), bytearray(whole[begin:])
    about = header.pop("__metadata__")
    if way < 0.65:
        text = json.dumps(mutated(json.loads(about[key]), rng))
        about = {key: text, **(checksum(text) if checksum else {})}
    elif way < 0.85 and header:
        header = mutated(header, rng)
    else:
        for _ in range(min(rng.choice([1, 5, 100]), len(data) // 8)):
            place = rng.randrange(len(data) // 8) * 8
            data[place : place + 8] = struct.pack("<d", rng.choice(NUMBERS))
    head = json.dumps({**header, "__metadata__": about}).encode()
    return len(head).to_bytes(8, "little") + head + data
