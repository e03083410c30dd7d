"""TRL's own GRPOTrainer with a tiny model: micro-batches in which nothing counts, and a wrong denominator."""

import pytest
import torch
from tests.integrations.tiny_trainer import logged

import gradguard as gg
from gradguard.integrations.transformers import SampleNormsCallback
from gradguard.monitoring.judge.health import findings
from gradguard.monitoring.record.file import read_record
from gradguard.parity.compare import compare

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="TRL's data are not installed")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own
END, WORDS, NEW = 1, 20, 6


def tokenizer():
    words = {f"w{i}": i for i in range(WORDS)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=f"w{END}", pad_token="w0", unk_token="w0"
    )


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=END, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Kept(trl.GRPOTrainer):
    """Keeps the inputs of each loss; cuts what is to be cut, as where a completion has no end."""

    cut, counted = (), None

    def _generate_and_score_completions(self, inputs):
        made = super()._generate_and_score_completions(inputs)
        for row in self.cut:
            made["completion_mask"][row] = 0
        return made

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.counted is not None:
            inputs = {**inputs, "num_items_in_batch": torch.tensor(self.counted)}
        self.kept.append(dict(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)


def trained(folder, loss, callbacks=(), cut=(), counted=None, **options):
    arguments = trl.GRPOConfig(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=4, max_completion_length=NEW,
        loss_type=loss, seed=3, bf16=False, gradient_checkpointing=False, **options,
    )  # fmt: skip

    def reward(completions, **_):
        return [float(len(set(text.split()))) + 0.1 * i for i, text in enumerate(completions)]

    table = datasets.table.InMemoryTable.from_pydict({"prompt": ["w3 w4 w5", "w6 w7"] * 8})
    prompts = datasets.Dataset(table, fingerprint="prompts")
    made = Kept(llama(), reward, args=arguments, train_dataset=prompts, processing_class=tokenizer(),
                callbacks=[*callbacks])  # fmt: skip
    made.cut, made.counted, made.kept = cut, counted, []
    made.train()
    return made


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_micro_batches_in_which_nothing_counts_are_told(tmp_path, loss):
    """unsloth#3006, verl#2505: with every completion of one cut, its share is zero, and it counts in the average."""
    callback = SampleNormsCallback()
    with gg.watch(tmp_path / "run.jsonl") as watch:
        done = trained(tmp_path, loss, [callback], cut=range(8))
    assert callback.steps[-1].without_a_share == [0, 1, 2, 3]
    assert logged(done, "sample_norm_empty_micro_batches") == [4]
    (found,) = [one for one in findings(read_record(watch.path)) if one.kind == "empty_micro_batch"]
    assert (found.value, found.first_step) == (4, 0)


def test_shares_do_not_tell_a_wrong_denominator_from_a_design(tmp_path):
    """slime#657: tokens that nothing counts are divided by; so does ``dr_grpo``, on purpose, with the same shares."""
    shares = []
    for loss, counted in (("dr_grpo", None), ("dapo", 8.0 * NEW), ("dapo", None)):
        callback = SampleNormsCallback()
        trained(tmp_path, loss, [callback], counted=counted)
        shares.append(torch.cat([*callback.steps[-1].norms]))
    design, wrong, right = shares
    torch.testing.assert_close(wrong, design, rtol=1e-4, atol=0)
    assert (right > 1.01 * design).all()


def test_a_denominator_that_counts_cut_completions_is_a_factor(tmp_path):
    """trl#6369, slime#657: tokens that the mask takes out of the sum are still counted where it is divided."""
    done = trained(tmp_path, "dapo")
    inputs = done.kept[0]
    counted = float(inputs["num_items_in_batch"])

    def step(times):
        given = {**inputs, "num_items_in_batch": inputs["num_items_in_batch"] * times}
        return lambda: done.compute_loss(done.model, given).backward()

    right = gg.save_gradients(None, done.model, step(1), perturbed=1)
    facts = {"all tokens for each that counts": (counted + NEW) / counted}
    wrong = gg.save_gradients(None, done.model, step((counted + NEW) / counted), perturbed=1, facts=facts)
    assert "(1 / all tokens for each that counts)" in str(compare(right, wrong))
