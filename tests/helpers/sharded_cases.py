"""A program for two processes: the same runs with sharded and with whole models, compared number by number.

Arguments: the folder of the small models, a folder for results, and cases or runs. Each process writes its
`results-RANK.json`.
"""

import gc
import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig as PeftLora
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.rewards import vowels
from tokencredit import PPOConfig, PPOTrainer
from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import gathered, is_sharded, sharded_in, whole
from tokencredit.errors import ConfigError
from tokencredit.learn.training_mode import training
from tokencredit.text.engines.plain_weights import plain_weights
from tokencredit.text.models.actor_critic import idle_row
from tokencredit.text.models.run_models import save_policy
from tokencredit.text.rollout_passes import values_after

SMALL = {
    "model.dtype": "float32",
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 4,
    "ppo.epochs": 1,
    "ppo.minibatches": 1,
    "ppo.micro_batch_tokens": 40,
    "critic.init": "orthogonal",
    "kl.coef": 0.1,
    "prompts.text": ["This movie was", "I"],
    "run.iterations": 1,
    "run.save_every": 0,
}
SEPARATE = {"critic.kind": "separate"}
CASES = {
    "shared": {
        "model.name": "gpt2",
        "ppo.entropy_coef": 0.01,
        "sharding.sampling": "layers",
        "model.dtype": "bfloat16",
    },
    "tapped": {"model.name": "qwen3", "critic.layers": 1, "kl.estimator": "full", "kl.place": "loss"},
    "separate": SEPARATE
    | {
        "model.name": "llama",
        "model.gradient_checkpointing": True,
        "kl.estimator": "full",
        "kl.place": "both",
        "sharding.layers": ["model.layers.*.mlp", "model.layers.*.self_attn"],
    },
    "truncated": SEPARATE
    | {
        "model.name": "gpt2",
        "critic.layers": 1,
        "advantage.bootstrap": True,
        "sharding.reshard_after_forward": False,
    },
    "wrapped": SEPARATE | {"model.name": "opt", "critic.detach": True},
    "requests": {"model.name": "qwen3", "rollout.engine": "continuous"},
    "lora": {"model.name": "llama", "model.lora.rank": 2, "kl.estimator": "full", "kl.place": "loss"},
    "continued": {"model.name": "adapter", "model.gradient_checkpointing": True},
}


def per_token(completions, completion_ids, **columns):
    """A reward for each token, as a bootstrap needs."""
    return [[float(token % 7) for token in ids] for ids in completion_ids]


def trainer(settings, folder, models, model=None):
    """A trainer, and what it gives for one batch: the rollout, the credit and the gradient."""
    settings = SMALL | settings | {"run.dir": str(folder)}
    settings["model.name"] = str(models / settings["model.name"])
    args = PPOConfig.from_dict(settings)
    reward = per_token if args.advantage.bootstrap else vowels
    made = PPOTrainer(model, reward, args, processing_class=AutoTokenizer.from_pretrained(models / "gpt2"))
    scored = made.collect()
    made.rollout = scored.rollout
    _, experience = made.credit.give(scored)
    with training(made.learner.training_modules):
        records = made.learner.accumulate_gradients(experience)
    numbers = {
        "ids": scored.rollout.response_ids,
        "logprobs": scored.rollout.logprobs,
        "values": scored.rollout.values,
        "ref_logprobs": scored.reference.logprobs,
        "advantages": experience.advantages,
        "loss": torch.stack([record.loss for record in records]),
    }
    if scored.bootstrap is not None:
        numbers["bootstrap"] = scored.bootstrap
    return made, numbers | gradients(made)


def gradients(made):
    named = made.policy.named_parameters()
    return {f"gradient of {name}": whole(p.grad.detach()) for name, p in named if p.grad is not None}


def differences(sharded, plain):
    """The largest difference of each number, and of all gradients together."""
    assert set(sharded) == set(plain), set(sharded) ^ set(plain)
    apart = {name: float((sharded[name] - x).abs().max()) for name, x in plain.items()}
    gradient = {name: x for name, x in apart.items() if name.startswith("gradient")}
    size = max(float(plain[name].abs().max()) for name in gradient)
    rest = {name: x for name, x in apart.items() if name not in gradient}
    return rest | {"gradient": max(gradient.values()) / size, "gradients": len(gradient)}


def without_tokens(made):
    """The largest gradient of a pass in which no token was acted; it raises if a trained tensor has none."""
    for p in made.learner.parameters:
        p.grad = None
    outputs = made.policy(idle_row(torch.device("cpu")), temperature=1.0)
    (outputs[0] + outputs.values.sum()).backward()
    return max(float(whole(p.grad).abs().max()) for p in made.learner.parameters)


def saved_alike(made, plain, folder, main):
    """True if both policies write the same files with the same weights."""
    from safetensors.torch import load_file

    sharded, plainly = (
        partial(save_policy, folder / kind / "policy", beside=folder / kind / "critic") for kind in ("sharded", "whole")
    )
    sharded(made.policy, made.tokenizer, writes=main)
    if not main:
        return True
    plainly(plain.policy, plain.tokenizer)
    files = [{str(f.relative_to(folder / kind)) for f in (folder / kind).rglob("*.*")} for kind in ("sharded", "whole")]
    tensors = [f for f in files[0] if f.endswith(".safetensors")]
    pairs = [(load_file(folder / "sharded" / f), load_file(folder / "whole" / f)) for f in tensors]
    return files[0] == files[1] and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b) for a, b in pairs
    )


def compare(name, models, folder, processes):
    """The differences of a case."""
    settings = CASES[name]
    plain_settings = {key: value for key, value in settings.items() if not key.startswith("sharding.")}
    made, numbers = trainer(settings | {"run.shard": "full"}, folder / name, models)
    mapped = mapped_weights()
    plain, expected = trainer(plain_settings, folder / f"{name} {processes.rank}", models)
    result = differences(numbers, expected) | {"same origin": made.origin == plain.origin}
    result["mapped"] = mapped
    result["sharded"] = [type(x).__name__ for x in sharded_in(made.policy)]
    result["reference"] = made.reference is made.policy or is_sharded(made.reference.lm)
    result["saved alike"] = saved_alike(made, plain, folder / f"{name} saved", processes.main)
    result["without tokens"] = without_tokens(made)
    result["weights"] = weights_apart(made.policy, plain.policy)
    with gathered(made.policy):
        if processes.main:  # alone
            result["weights"] += weights_apart(made.policy, plain.policy)
    if "bootstrap" in numbers:
        with made.pipeline.precision.no_grad():
            whole_texts = replace(made.rollout, truncated=torch.zeros_like(made.rollout.truncated))
            after = values_after(made.policy, whole_texts, None, None, made.pipeline.lockstep)
        result["bootstrap"] += float(after.abs().max())
    if made.policy.critic.shared:
        with gathered(made.policy):  # in which one process alone makes a pass
            if processes.main:
                alone = replace(made.pipeline.engine, in_step=None)
                result["alone"] = float((sampled(made, alone) - sampled(plain, plain.pipeline.engine)).abs().max())
    result["stale"] = stale_after_loading(made.policy.lm)
    return result


def stale_after_loading(lm):
    """How far gathered weights are from a process's own parts, after these were loaded again and changed."""
    lm.load_state_dict(lm.state_dict())
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(2)
    expected = [whole(head.weight.detach()) for head in (lm.get_input_embeddings(), lm.get_output_embeddings())]
    with gathered(lm):
        held = [head.weight.detach() for head in (lm.get_input_embeddings(), lm.get_output_embeddings())]
        return max(float((a - b).abs().max()) for a, b in zip(held, expected, strict=True))


def mapped_weights():
    """The files of weights that are mapped into this process's memory."""
    gc.collect()  # whole models of the case before
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if line.endswith("/model.safetensors")})


def weights_apart(sharded, plain):
    """The largest difference of the weights that another engine loads; the names are the same."""
    found, expected = dict(plain_weights(sharded)), dict(plain_weights(plain))
    assert set(found) == set(expected), set(found) ^ set(expected)
    return max(float((found[name] - x).abs().max()) for name, x in expected.items())


def sampled(made, engine):
    """Log-probs of two completions."""
    uniforms = torch.rand(2, SMALL["rollout.max_new_tokens"], generator=torch.Generator().manual_seed(0))
    return engine.generate(made.prompts.batch(0, 2), made.args.rollout, uniforms).logprobs


def train(sampling, models, folder):
    """Train with this way of sampling, into the folder of its name."""
    changes = {"run.shard": "full", "sharding.sampling": sampling, "run.dir": str(folder / sampling)}
    PPOTrainer(None, vowels, PPOConfig.from_dict(run_settings(models) | RUNS[sampling] | changes)).train()


RUNS = {"gathered": {"audit.every": 2, "audit.completions": 2, "audit.states": 1}, "layers": {}}
"""Settings of the training runs, by `sharding.sampling`."""


def run_settings(models):
    """Settings of a short run."""
    own = {"model.name": str(models / "gpt2"), "run.iterations": 2, "eval.every": 1, "eval.samples": 4}
    own |= {"optim.eps": 1e-4}  # Adam would turn rounding into steps
    own |= {"run.show_every": 0, "run.trackers": []}
    return SMALL | SEPARATE | own


def from_python(models, folder, processes):
    """A model that is whole when it comes, with a separate critic copied from it."""
    settings, numbers = SEPARATE | {"model.name": "gpt2"}, []
    for number, shard in enumerate(("full", "none")):
        model = AutoModelForCausalLM.from_pretrained(models / "gpt2")
        place = folder / (f"python {number}" if shard == "full" else f"python {processes.rank} {number}")
        _, of_batch = trainer(settings | {"run.shard": shard}, place, models, model)
        numbers.append(of_batch)
    return differences(*numbers)


def refusals(models, folder, processes):
    """The messages for what does not work with sharded models."""
    cases = {
        "merged critic": ({"model.name": "adapter"} | SEPARATE, None),
        "bias": ({"model.name": "gpt2"}, PeftLora(task_type="CAUSAL_LM", target_modules="all-linear", bias="all")),
        "pissa": ({"model.name": "gpt2"}, PeftLora(target_modules="all-linear", init_lora_weights="pissa")),
    }
    messages = {}
    for name, (settings, peft_config) in cases.items():
        changes = {
            "run.dir": str(folder / name),
            "run.shard": "full",
            "model.name": str(models / settings["model.name"]),
        }
        try:
            PPOTrainer(None, vowels, PPOConfig.from_dict(SMALL | settings | changes), peft_config=peft_config)
        except ConfigError as error:
            messages[name] = str(error)
    return messages


OTHERS = {"from Python": from_python, "refusals": refusals}


def main(models, folder, cases):
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module \(FSDPOPTDecoderLayer\)")  # OPT's own, and harmless there
    processes, results = Processes(), {}
    for name in cases:
        if name in RUNS:
            train(name, models, folder)
        elif name in OTHERS:
            results[name] = OTHERS[name](models, folder, processes)
        else:
            results[name] = compare(name, models, folder, processes)
    (folder / f"results-{processes.rank}.json").write_text(json.dumps(results))
    processes.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), sys.argv[3:])
