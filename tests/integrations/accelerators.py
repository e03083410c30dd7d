"""Accelerate keeps its state in classes: what a test has set up, the next one would find."""

import sys


def forget_accelerators():
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
