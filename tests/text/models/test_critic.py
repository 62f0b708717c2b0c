"""Critics of every kind, and none; a critic that a run saved is taken up again."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from helpers.configs import text_config
from helpers.files import read_events
from helpers.models import changed_weights, copy_weights
from helpers.proofs import proofs
from tokencredit.core.masked import explained_variance
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import AdvantageConfig, KLConfig, OptimConfig, UpdateConfig
from tokencredit.text.models.critic import Critic, build_value_head
from tokencredit.text.models.model_loading import load_language_model
from tokencredit.text.models.run_models import build_policy
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rollout_passes import rollout_values
from tokencredit.tools.load_run import load

WORDS = ["acting", "plot", "film", "story", "ending", "music", "cast", "script"]
NONE = CriticConfig(kind="none")
GROUPS = {"advantage": AdvantageConfig(estimator="group_relative"), "critic": NONE}

FIT = {
    "optim": OptimConfig(lr=1e-3, warmup=0, weight_decay=0.01),
    "ppo": UpdateConfig(epochs=2, minibatches=1, micro_batch_tokens=64),
    "prompts": PromptsConfig(text=[f"The {word}" for word in WORDS]),  # no two texts share a state
    "rollout": RolloutConfig(batch_size=8, max_new_tokens=8),
}


def small(folder, **changes):
    rollout = RolloutConfig(batch_size=8, max_new_tokens=8, per_prompt=4)
    return text_config(folder, **{"rollout": rollout} | changes)


def constant(prompts, completions):
    return [0.5] * len(completions)


@pytest.mark.parametrize("estimator", ["uniform", *proofs("group_relative", "leave_one_out")])
def test_a_constant_reward_moves_no_policy_without_a_critic(estimator, tmp_path):
    args = small(
        tmp_path,
        advantage=AdvantageConfig(estimator=estimator, whiten="none"),
        critic=NONE,
        kl=KLConfig(coef=0.0),
    )
    trainer = PPOTrainer(args=args, reward_funcs=constant)
    if estimator == "uniform":  # its baseline is the mean of earlier scores
        trainer.credit.baseline.update(torch.full((8,), 0.5))
    before = copy_weights(trainer.policy.lm)
    metrics, _ = trainer.iteration(1)
    assert metrics["steps"] == 4
    assert metrics["grad_norm"] == 0
    assert not changed_weights(trainer.policy.lm, before)


def test_a_critic_on_the_trunk_moves_the_policy_at_a_constant_reward(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path, kl=KLConfig(coef=0.0)), reward_funcs=constant)
    before = copy_weights(trainer.policy.lm)
    for number in (1, 2):  # in the first update a head of zeros hands no gradient down
        trainer.iteration(number)
    assert changed_weights(trainer.policy.lm, before)


class Counting(TorchDispatchMode):
    """Counts matrix products, and collects the sizes of their results."""

    def __init__(self):
        super().__init__()
        self.products, self.sizes = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.products += 1
            self.sizes |= set(out.shape)
        return out


def test_no_value_is_computed_without_a_critic(tmp_path):
    """Passes are counted: those of a separate critic's trunk are gone, and so are a shared head's two layers."""
    counts, trained, passes = {}, {}, {}
    for kind in ("none", "shared", "separate"):
        own = GROUPS if kind == "none" else {"critic": CriticConfig(kind=kind)}
        args = small(tmp_path / kind, ppo=UpdateConfig(epochs=1, minibatches=1), **own)
        trainer = PPOTrainer(args=args, reward_funcs=[Term("length", 1.0, lambda prompts, completions: [1.0] * 8)])
        trunk = trainer.policy.critic.trunk if kind == "separate" else None
        calls = []
        if trunk is not None:
            trunk.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        scored = trainer.collect()
        experience = trainer.credit.give(scored)[1]
        with Counting() as counting:
            metrics = trainer.learner.update(experience)
        counts[kind], passes[kind] = counting.products, len(calls)
        trained[kind] = sum(p.numel() for p in trainer.learner.parameters)
        has_critic = kind != "none"
        assert (scored.rollout.values is not None) == has_critic
        assert ("value_loss" in metrics) == has_critic
        assert ("value_lr" in trainer.learner.set_rates(1)) == has_critic
        assert ("explained_variance" in trainer.credit.give(scored)[0].metrics(trainer.processes)) == has_critic
    # A pass with gradients: two layers forward, and backward two products each.
    assert counts["shared"] - counts["none"] == 6
    assert passes == {"none": 0, "shared": 0, "separate": 2}, "before the update's one step, and in it"
    lm = sum(p.numel() for p in trainer.policy.lm.parameters())
    head = sum(p.numel() for p in trainer.policy.critic.head.parameters())
    # Gradients and AdamW's two moments are as large as what is trained.
    assert trained["none"] == lm
    assert trained["shared"] == lm + head
    assert trained["separate"] > 1.5 * lm


def test_a_run_without_a_critic_leaves_readable_files(tmp_path):
    summary = PPOTrainer(args=small(tmp_path / "run", **GROUPS)).train()
    sample = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert "values" not in sample
    assert len(sample["advantages"]) == len(sample["tokens"])
    assert summary["reward_last"] is not None
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "critic").exists()


@pytest.mark.parametrize("kind", ["separate", *proofs("shared")])
def test_a_run_that_starts_from_another_runs_policy_gets_its_critic_back_if_it_fits(kind, tmp_path):
    alone = partial(CriticConfig, kind=kind, prefix_every=0)
    first = PPOTrainer(args=small(tmp_path / "a", critic=alone()))
    first.train()
    trained = {name: x.clone() for name, x in first.policy.critic.state_dict().items()}
    assert trained["head.2.weight"].abs().sum() > 0
    model = ModelConfig(name=str(tmp_path / "a" / "policy"), dtype="float32")
    second = PPOTrainer(args=small(tmp_path / "b", model=model, critic=alone()))
    assert all(torch.equal(x, trained[name]) for name, x in second.policy.critic.state_dict().items())
    second.train()
    events = read_events(tmp_path / "b")
    assert f"the critic continues from the one saved in {tmp_path / 'a' / 'critic'}" in events
    fresh = PPOTrainer(args=small(tmp_path / "c", model=model, critic=alone(init="zeros")))
    assert fresh.policy.critic.head[-1].weight.abs().sum() == 0
    assert fresh.notes == []
    for changed in ({"head": "linear"}, {"activation": "relu"}):
        (note,) = PPOTrainer(args=small(tmp_path / "c", model=model, critic=alone(**changed))).notes
        assert note.endswith("starting a new one")
    (tmp_path / "a" / "critic" / "value_head.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"value_head.safetensors: .*critic.init: zeros to start a new critic"):
        PPOTrainer(args=small(tmp_path / "d", model=model, critic=alone()))


@pytest.mark.parametrize(("saved", "asked"), [({"kind": "separate"}, {"kind": "shared"}), ({"loss": "histogram"}, {})])
@pytest.mark.proof  # above: another head
def test_a_note_says_that_a_saved_critic_does_not_fit(saved, asked, tmp_path):
    alone = partial(CriticConfig, prefix_every=0)
    PPOTrainer(args=small(tmp_path / "a", critic=alone(**saved))).train()
    model = ModelConfig(name=str(tmp_path / "a" / "policy"), dtype="float32")
    trainer = PPOTrainer(args=small(tmp_path / "b", model=model, critic=alone(**asked)))
    assert len(trainer.notes) == 1
    assert trainer.notes[0].endswith("starting a new one")
    assert trainer.policy.critic.head[-1].weight.abs().sum() == 0


def test_an_adapter_is_not_part_of_a_separate_critics_trunk():
    pytest.importorskip("peft")
    model = ModelConfig(lora=LoraConfig(rank=2))
    lm, tokenizer = load_language_model(model)
    policy, _ = build_policy(lm, tokenizer, model, CriticConfig(kind="separate"))
    assert not any("lora" in name for name, _ in policy.critic.named_parameters())


@pytest.mark.proof  # learn/test_learner.py
def test_steps_of_the_critic_alone_fit_the_returns_and_leave_the_policy_bit_for_bit(tmp_path):
    weights, values = {}, {}
    for epochs in (0, 100):
        changes = FIT | {"critic": CriticConfig(lr=1e-2, clip=None, epochs=epochs)}
        trainer = PPOTrainer(args=small(tmp_path / str(epochs), **changes))
        scored = trainer.collect()
        batch, experience = trainer.credit.give(scored)
        metrics = trainer.update(1, batch, experience)
        assert metrics.get("critic_steps", 0) == epochs
        weights[epochs] = {name: x.clone() for name, x in trainer.policy.lm.state_dict().items()}
        with torch.no_grad():
            now = rollout_values(trainer.policy, scored.rollout, None)
        values[epochs] = explained_variance(now, experience.of_critic()[1], experience.mask).item()
    assert all(torch.equal(x, weights[100][name]) for name, x in weights[0].items())
    assert values[0] < 0.9 < 0.99 < values[100]
    assert metrics["critic_value_loss"] < 0.01 * metrics["value_loss"]


@pytest.mark.parametrize("kind", ["separate", *proofs("shared")])
def test_a_histogram_fits_the_returns(kind, tmp_path):
    changes = FIT | {"critic": CriticConfig(kind=kind, lr=1e-2, loss="histogram", epochs=40)}
    changes |= {"ppo": UpdateConfig(epochs=2, minibatches=1), "rollout": RolloutConfig(batch_size=8, max_new_tokens=4)}
    trainer = PPOTrainer(args=small(tmp_path, **changes))
    scored = trainer.collect()
    batch, experience = trainer.credit.give(scored)
    trainer.update(1, batch, experience)
    now = rollout_values(trainer.policy, scored.rollout, None)
    assert explained_variance(now, experience.of_critic()[1], experience.mask) > 0.97


@pytest.mark.parametrize(
    ("head", "detach"),
    [("mlp", True), *proofs(("linear", False), ("linear", True), ("mlp", False))],
)
def test_a_histogram_s_values_are_0_at_first_then_the_same_in_every_pass_and_after_loading(head, detach, tmp_path):
    critic = CriticConfig(loss="histogram", head=head, detach=detach, lr=1e-2)
    trainer = PPOTrainer(args=small(tmp_path / "a", critic=critic))
    assert trainer.collect().rollout.values.abs().max() == 0
    trainer.train()
    scored = trainer.collect()
    rollout = scored.rollout
    with torch.no_grad():
        now = rollout_values(trainer.policy, rollout, None)
        outputs = trainer.policy.critic_outputs(rollout.inputs())
    mask = rollout.mask
    assert now[mask].unique().numel() > 8
    torch.testing.assert_close(rollout.values[mask], now[mask], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(outputs.values[mask], now[mask], atol=1e-5, rtol=1e-4)
    assert outputs.histogram.logits.shape == (int(mask.sum()), 51)
    inside = trainer.policy.critic.head.support
    assert bool(((now[mask] > inside[0]) & (now[mask] < inside[1])).all())
    model = ModelConfig(name=str(tmp_path / "a" / "policy"), dtype="float32")
    again = PPOTrainer(args=small(tmp_path / "b", model=model, critic=critic))
    with torch.no_grad():
        assert torch.equal(rollout_values(again.policy, rollout, None), now)


def test_a_histogram_s_gradient_reaches_the_trunk_unless_it_is_detached(tmp_path):
    for detach in (False, True):
        args = small(tmp_path / str(detach), critic=CriticConfig(loss="histogram", init="default", detach=detach))
        trainer = PPOTrainer(args=args)
        inputs = trainer.collect().rollout.inputs()
        trainer.policy(inputs, temperature=1.0).critic.histogram.logits.square().sum().backward()
        assert all(p.grad is not None for p in trainer.policy.critic.head.parameters())
        gradient = trainer.policy.lm.get_input_embeddings().weight.grad
        assert (gradient is None) is detach


def test_steps_of_the_critic_alone_compute_no_vocabulary(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path, critic=CriticConfig(epochs=1)))
    _, experience = trainer.credit.give(trainer.collect())
    vocabulary = trainer.policy.lm.config.vocab_size
    with Counting() as shapes:
        trainer.learner.critic_steps(experience, trainer.learner.objective, 1, lambda *_: None)
    assert shapes.sizes
    assert vocabulary not in shapes.sizes


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("trunk_lr", [None, 3e-5])
def test_a_separate_critics_trunk_has_the_policys_rate_or_its_own(name, trunk_lr, tmp_path):
    """Groups by rate and optimizer: Muon takes the hidden matrices of both trunks, AdamW all else."""
    optim = OptimConfig(name=name, lr=2e-4, warmup=0, schedule="constant")
    args = small(tmp_path, critic=CriticConfig(kind="separate", lr=5e-3, trunk_lr=trunk_lr), optim=optim)
    trainer = PPOTrainer(args=args)
    names = {id(p): n for n, p in trainer.policy.named_parameters()}
    rates, by_muon = {}, set()
    for group in trainer.learner.optimizer.param_groups:
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["lr"]
            by_muon |= {names[id(parameter)]} if "ns_steps" in group else set()
    assert set(rates) == set(names.values())
    expected = {"lm": 2e-4, "critic.trunk": trunk_lr or 2e-4, "critic.head": 5e-3}
    for parameter, rate in rates.items():
        assert rate == next(lr for part, lr in expected.items() if parameter.startswith(part)), parameter
    assert trainer.learner.set_rates(1) == {"lr": 2e-4, "trunk_lr": trunk_lr or 2e-4, "value_lr": 5e-3}
    hidden = {"wte", "wpe", "embed_tokens", "lm_head", "embed_out"}
    matrices = {
        n
        for n, p in trainer.policy.named_parameters()
        if p.dim() == 2 and not n.startswith("critic.head") and not hidden & set(n.split("."))
    }
    assert by_muon == (matrices if name == "muon" else set())
    if name == "muon":
        assert {n.split(".")[0] for n in by_muon} == {"lm", "critic"}


def test_a_head_of_default_init_is_that_of_nn_linear():
    torch.manual_seed(5)
    head = build_value_head("mlp", 8, "default")
    torch.manual_seed(5)
    last = torch.nn.Linear(32, 1)  # which is made first
    assert torch.equal(head[0].weight, torch.nn.Linear(8, 32).weight)
    assert torch.equal(head[2].weight, last.weight)


def test_a_head_with_relu_goes_on_with_relu_alone(tmp_path):
    relu = partial(CriticConfig, activation="relu", init="default", lr=0.1, prefix_every=0)
    first = PPOTrainer(args=small(tmp_path / "a", critic=relu()))
    first.train()
    model = ModelConfig(name=str(tmp_path / "a" / "policy"), dtype="float32")
    again = PPOTrainer(args=small(tmp_path / "b", model=model, critic=relu(init="saved"))).policy.critic
    states = torch.randn(4, first.policy.critic.head[0].in_features)
    assert torch.equal(again.head(states), first.policy.critic.head(states))
    assert torch.equal(load(tmp_path / "a").model.critic.head(states), again.head(states))
    (note,) = PPOTrainer(args=small(tmp_path / "c", model=model, critic=CriticConfig(prefix_every=0))).notes
    assert note.endswith("starting a new one")


def test_a_model_without_a_name_gets_a_new_critic(tmp_path, tokenizer, monkeypatch):
    """A model that was made in Python has no folder, and what lies in the current one is not its critic."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "value_head.safetensors").write_bytes(b"somebody's")
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(eos_token_id=tokenizer.eos_token_id, **shape))
    for init in ("saved", "zeros"):
        args = small(tmp_path / init, critic=CriticConfig(init=init))
        trainer = PPOTrainer(model=model, processing_class=tokenizer, args=args)
        assert trainer.policy.critic.head[-1].weight.abs().sum() == 0


def test_a_new_head_goes_on_the_trunk_that_critic_name_saved(tmp_path):
    first = PPOTrainer(args=small(tmp_path / "a", critic=CriticConfig(kind="separate", lr=0.1, prefix_every=0)))
    first.train()
    asked = CriticConfig(kind="separate", name=str(tmp_path / "a" / "critic"), init="zeros")
    again = PPOTrainer(args=small(tmp_path / "b", critic=asked))
    expected = first.policy.critic.trunk.state_dict()
    assert all(torch.equal(x, expected[key]) for key, x in again.policy.critic.trunk.state_dict().items())
    assert again.policy.critic.head[-1].weight.abs().sum() == 0


def test_a_head_alone_is_no_separate_critic(tmp_path, tokenizer):
    (tmp_path / "critic").mkdir()
    Critic(build_value_head("mlp", 128)).save_head(tmp_path / "critic", tokenizer)
    for name in (tmp_path, tmp_path / "critic"):
        asked = CriticConfig(kind="separate", name=str(name))
        with pytest.raises(ConfigError, match=r"has no trunk of its own, .* give the policy that it belongs to"):
            PPOTrainer(args=small(tmp_path / "run", critic=asked))


def test_an_adapters_folder_is_no_critic(model_folders, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    asked = CriticConfig(kind="separate", name=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"critic\.name is .*, which holds an adapter instead of a critic"):
        PPOTrainer(args=small(tmp_path / "run", critic=asked))


def test_a_detached_separate_critic_trains_its_head_alone(tmp_path):
    trainer = PPOTrainer(args=small(tmp_path, critic=CriticConfig(kind="separate", detach=True)))
    before = copy_weights(trainer.policy.critic)
    trainer.iteration(1)
    assert {name.split(".")[0] for name in changed_weights(trainer.policy.critic, before)} == {"head"}
    assert not any(p.requires_grad for p in trainer.policy.critic.trunk.parameters()), (
        "processes need not wait for them"
    )


def test_a_critic_that_sees_the_future_is_refused(tokenizer, tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    encoder = BertModel(BertConfig(vocab_size=len(tokenizer), **shape), add_pooling_layer=False)  # nothing reads it
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    critic = CriticConfig(kind="separate", name=str(tmp_path / "encoder"))
    with pytest.raises(ConfigError, match=r"the separate critic .*encoder.* is not causal"):
        PPOTrainer(args=small(tmp_path / "run", critic=critic))


def test_a_critic_without_weights_for_a_layer_is_refused(model_folders, tmp_path):
    """Transformers would draw them at random."""
    shutil.copytree(model_folders["llama"], tmp_path / "critic")
    file = tmp_path / "critic" / "model.safetensors"
    weights = {key: x for key, x in load_file(file).items() if ".layers.0." not in key}
    save_file(weights, file, metadata={"format": "pt"})
    critic = CriticConfig(kind="separate", name=str(tmp_path / "critic"))
    with pytest.raises(ConfigError, match=r"^critic\.name: .* is not a whole model: its weights lack layers\.0\."):
        PPOTrainer(args=small(tmp_path / "run", critic=critic))


def test_a_critic_with_other_ids_for_the_same_tokens_is_refused(model_folders, tokenizer, tmp_path):
    """As many tokens, two of which have changed places."""
    folder = tmp_path / "critic"
    shutil.copytree(model_folders["llama"], folder)
    file = folder / "tokenizer.json"
    state = json.loads(file.read_text())
    vocabulary = state["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(state))
    critic = CriticConfig(kind="separate", name=str(folder))
    with pytest.raises(
        ConfigError, match=r"critic\.name is .* other ids for 2 of the policy's \d+ tokens, such as 301"
    ):
        PPOTrainer(args=small(tmp_path / "run", critic=critic))
    for path in folder.glob("*token*"):
        path.unlink()
    PPOTrainer(args=small(tmp_path / "run", critic=critic))  # without a tokenizer the sizes are compared
