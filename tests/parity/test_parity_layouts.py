"""Sketches and verdicts of sharded models: every layout gives the whole gradient, and ranks that differ are found."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "distributed"))  # its processes and layouts
from pool import Pools
from sharded import LAYOUTS, laid_out
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from training import WAYS, Network, batch, build, own_samples

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.parity.compare import compare
