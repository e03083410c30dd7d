"""The source lines of the operations whose backward computes a gradient, if anomaly detection has recorded them."""

import re
from pathlib import Path

import torch
from torch.autograd.graph import Node

from gradguard.backward_clip.backward_graph import Graph
from gradguard.torch_private import recorded_stack

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parents[1])


def makers_with_lines(graph: Graph) -> dict[Node, str]:
    """Find the source line of each operation of ``graph``, if the forward ran under anomaly detection.

    Returns:
        For each node, the operations whose backward computes its gradient, with their source lines. Empty if anomaly
        detection recorded no lines.
    """
    if not any(recorded_stack(graph.nodes[position]) for position, _ in graph.roots):
        return {}
    makers: dict[Node, dict[str, None]] = {}
    for node in graph.nodes:
        named = f"{node.name()}{_place(node)}"
        for child, _ in node.next_functions:
            if child in graph.index:
                makers.setdefault(child, {})[named] = None
    return {node: ", ".join(names) for node, names in makers.items()}


def _place(node: Node) -> str:
    """Return the innermost source line that is neither PyTorch's nor gradguard's."""
    frames = [found for entry in recorded_stack(node) if (found := _FRAME.search(entry))]
    own = [frame for frame in frames if not any(Path(frame["file"]).is_relative_to(folder) for folder in _LIBRARIES)]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f" ({Path(frame['file']).name}, line {frame['line']}, in {frame['function']}: {frame['code'].strip()})"
