"""One training by each engine, for `gradguard run --audit-norm`; says the norm of a twin in float64 on one process."""

import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MAX, STEPS = 0.1, 4


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def network():
    torch.manual_seed(0)
    return Network()


def batch(step, rank=RANK):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * step + rank)) + rank


def loss_of(model, step):
    return model(batch(step)).square().sum(1).mean()


def tell_twin():
    """The norm of the third step, the last that is audited: of the mean over all processes, in float64."""
    twin = network().double()
    loss = sum(twin(batch(2, rank).double()).square().sum(1).mean() for rank in range(WORLD)) / WORLD
    for p, grad in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters())), strict=True):
        p.grad = grad  # without a backward pass of the script's
    if RANK == 0:
        whole = torch.cat([p.grad.flatten() for p in twin.parameters()])
        print(f"twin {float(whole.norm()):.6g}", flush=True)
    return twin


def by_hand(model, clip):
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        clip(model)
        optimizer.step()


def torchs_clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), MAX)


def ddp():
    dist.init_process_group("gloo")
    by_hand(nn.parallel.DistributedDataParallel(network()), torchs_clip)


def fsdp1(clip=torchs_clip):
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    by_hand(FullyShardedDataParallel(network(), device_id=torch.device("cpu")), clip)


def fsdp1_method():
    fsdp1(lambda model: model.clip_grad_norm_(MAX))


def fsdp2(clip=torchs_clip):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    model = network()
    fully_shard(model.first)
    fully_shard(model)
    by_hand(model, clip)


def torchtitan():
    from torchtitan.distributed import utils

    fsdp2(lambda model: utils.clip_grad_norm_(list(model.parameters()), MAX))


def on_two_meshes(clip, everywhere=False):
    """Dense layers, one of experts on another mesh, ordinary tensors unless ``everywhere``; gradients of the twin."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    dense = dist.device_mesh.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    experts = dist.device_mesh.init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("efsdp", "ep"))
    model, twin = network(), tell_twin()
    layouts = {model.first: (dense, [Shard(0)]), model.last: (experts, [Shard(0)] * 2)}
    for module, (mesh, shards) in (layouts | ({model.norm: (dense, [Replicate()])} if everywhere else {})).items():
        for name, p in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, shards)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    for _ in range(STEPS):
        for p, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
            grad = of_twin.grad.float()
            spread = hasattr(p, "placements")
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if spread else grad
        clip(model)
        optimizer.step()


def torchtitan_experts():
    from torchtitan.distributed import utils

    on_two_meshes(lambda model: utils.clip_grad_norm_(list(model.parameters()), MAX, ep_enabled=True), True)


def automodel():
    """Of NeMo Automodel, with experts on a mesh of their own."""
    from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

    on_two_meshes(lambda model: scale_grads_and_clip_grad_norm(MAX, [model]), True)


def verl():
    """What verl's workers clip by under FSDP2."""
    from verl.utils import fsdp_utils

    fsdp_utils.get_device_id = lambda: "cpu"  # it knows of a GPU's alone
    fsdp2(lambda model: fsdp_utils.fsdp2_clip_grad_norm_(model.parameters(), MAX))


def accelerate_two_meshes():
    """What Accelerator.clip_grad_norm_ calls under FSDP2, which Accelerate does not set up without a GPU."""
    from accelerate import Accelerator

    on_two_meshes(lambda model: Accelerator._clip_grad_norm_dtensor_aware(None, list(model.parameters()), MAX))


def trainer_two_meshes():
    """What Trainer calls where it finds gradients on several meshes."""
    from transformers import Trainer

    on_two_meshes(lambda model: Trainer._mixed_mesh_grad_norm(None, model, MAX))


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, step))
        accelerator.clip_grad_norm_(model.parameters(), MAX)
        optimizer.step()


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = network()

    def forward(self, x):
        return {"loss": self.inside(x).square().sum(1).mean()}


def trainer():
    from transformers import Trainer, TrainingArguments

    rows = [{"x": row} for step in range(STEPS) for i in range(8) for row in [batch(step, r)[i] for r in range(WORLD)]]
    arguments = TrainingArguments(
        output_dir=os.environ["AUDIT_FOLDER"], use_cpu=True, per_device_train_batch_size=8, max_steps=STEPS,
        max_grad_norm=MAX, learning_rate=1e-9, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        optim="sgd", train_sampling_strategy="sequential",
    )  # fmt: skip
    Trainer(model=WithLoss(), args=arguments, train_dataset=rows).train()


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inside = network()

        def training_step(self, step):
            return loss_of(self.inside, int(step))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    fit = lightning.Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_steps=STEPS, gradient_clip_val=MAX, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    fit.fit(Module(), torch.arange(STEPS))


def fabric():
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=DDPStrategy(process_group_backend="gloo"))
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1e-9))
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, step))
        fabric.clip_gradients(model, optimizer, max_norm=MAX)
        optimizer.step()


class WithExperts(Network):
    """Two experts, each of them on a process of its own."""

    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(RANK)  # of experts, which differ; DeepSpeed spreads the rest from one process
        self.experts = MoE(7, nn.Linear(7, 7), num_experts=2, ep_size=WORLD, capacity_factor=4.0, use_tutel=False)

    def forward(self, x):
        return self.last(self.experts(torch.tanh(self.norm(self.first(x))))[0])


def tell_true_norm(engine):
    """The norm of the gradients that processes hold: of each expert once, of all else as it is on each."""
    squares = torch.zeros(2, dtype=torch.float64)
    for p in engine.module.parameters():
        squares[int(getattr(p, "allreduce", True))] += p.grad.double().square().sum()
    dist.all_reduce(squares[:1])
    if RANK == 0:
        print(f"twin {float(squares.sum().sqrt()):.6g}", flush=True)


def zero(stage, kind="fp32", make=network):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it compiles C++ for a minute; gloo does without
    configuration = {
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": MAX, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if kind != "fp32":
        configuration[kind] = {"enabled": True}
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # not of every CPU
    model = make()
    groups = {"params": list(model.parameters()), "name": "all"}
    groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(groups)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups, 1e-9), config=configuration)
    for step in range(STEPS):
        out = engine(batch(step).to(next(engine.parameters()).dtype))
        engine.backward(out.float().square().sum(1).mean())
        if make is not network and step == 2:
            tell_true_norm(engine)
        engine.step()


def zero0():
    zero(0)


def zero1():
    zero(1)


def zero2():
    zero(2)


def zero3():
    zero(3)


def zero1_bf16():
    zero(1, "bf16")


def zero0_fp16():
    zero(0, "fp16")


def zero_experts():
    zero(0, make=WithExperts)


def zero_experts_fp16():
    zero(0, "fp16", WithExperts)


if __name__ == "__main__":
    if "zero_experts" not in sys.argv[1]:
        tell_twin()
    globals()[sys.argv[1]]()
