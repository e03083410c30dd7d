"""The algorithms in Composer's own Trainer, beside Composer's own algorithm.

Composer's wheel wants an older torch than its code does, so that it is installed without its dependencies; of
torchvision, which it imports for its vision algorithms, a stand-in without content will do.
"""

import importlib.util
import json

import pytest

from forked_python import run_python

if importlib.util.find_spec("composer") is None or importlib.util.find_spec("mcli") is None:
    reason = "Composer is not installed: pip install --no-deps mosaicml mosaicml-cli coolname"
    pytest.skip(reason, allow_module_level=True)

TRAIN = """
import importlib.machinery, importlib.util, json, sys, types, warnings

warnings.simplefilter("ignore")


class StandIn:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__file__ = spec.name
        module.__getattr__ = lambda name: type(name, (), {})
        return module

    def exec_module(self, module):
        pass


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.insert(0, StandIn())

import torch
from composer import ComposerModel, Trainer
from composer.algorithms import GradientClipping as Own
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from gradguard.integrations.composer import ClipGradients, GradientClipping

generator = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(64, 3, generator=generator), torch.randn(64, 1, generator=generator) * 3)


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().sum()


def train(*algorithms, **options):
    model = Model()
    trainer = Trainer(
        model=model, train_dataloader=DataLoader(DATA, batch_size=8), algorithms=list(algorithms), max_duration="8ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01), device="cpu", progress_bar=False, log_to_console=False,
        device_train_microbatch_size=4, **options,
    )
    trainer.fit()
    trainer.close()
    return [p.tolist() for p in model.parameters()]


kinds = {"norm": 0.5, "value": 0.3, "adaptive": 0.05}
median = lambda: gg.ClipByMedian(k=0.0, window=4, warmup=2)
folder = sys.argv[1]
last = ClipGradients(median())
whole = train(last, save_folder=folder, save_interval="4ba")
resumed = ClipGradients(median())
print(json.dumps({
    "none": train(),
    "own": {kind: train(Own(kind, threshold)) for kind, threshold in kinds.items()},
    "ours": {kind: train(GradientClipping(kind, threshold)) for kind, threshold in kinds.items()},
    "whole": whole,
    "resumed": train(resumed, load_path=f"{folder}/ep0-ba4-rank0.pt"),
    "last": [[float(one.last.norm), float(one.last.threshold)] for one in (last, resumed)],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composer")
    done = run_python("-c", TRAIN, folder, cwd=folder, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def flat(weights):
    return [x for tensor in weights for row in tensor for x in (row if isinstance(row, list) else [row])]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_it_trains_as_composers_own_algorithm(found, kind):
    own, ours = flat(found["own"][kind]), flat(found["ours"][kind])
    assert ours == pytest.approx(own, abs=1e-7)
    assert ours != pytest.approx(flat(found["none"]), abs=1e-3)


@pytest.mark.slow
def test_a_checkpoint_brings_the_clippers_history_back(found):
    assert found["resumed"] == found["whole"]
    assert found["last"][0] == found["last"][1]
