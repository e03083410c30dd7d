"""Finite spikes: detectors that recognise them, and the skip of a step that is one."""
