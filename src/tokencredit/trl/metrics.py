"""Metrics under TRL's names, and the callbacks that log them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from tokencredit.runs.summary import SHAPED
from tokencredit.text.ppo_trainer import PPOTrainer as Trainer
from tokencredit.trl.arguments import require

CALLED = ("on_train_begin", "on_log", "on_step_end", "on_train_end")
"""Methods of a TrainerCallback that are called, in TRL's order."""
K3 = "approx_kl_k3"
"""For `approxkl`, which is the mean of ½ (log ratio)² in TRL: equal up to the third order of the log ratio."""


class Relay:
    """A callback of ours that adds TRL's names to the metrics and calls TrainerCallbacks."""

    def __init__(self, owner: Any, callbacks: Sequence[Any] | None):
        require(list | tuple | None, "a list of TrainerCallbacks", callbacks=callbacks)
        self.owner, self.state, self.control, self.asked_to_stop = owner, TrainerState(), TrainerControl(), False
        self.callbacks: list[Any] = []
        self.lines = [
            line for i, callback in enumerate(callbacks or ()) for line in self.add(callback, f"callbacks[{i}]")
        ]

    def add(self, callback: Any, name: str = "callback") -> list[str]:
        """Add a callback or its class; returns lines on its methods that are not called."""
        made = callback() if isinstance(callback, type) else callback
        require(TrainerCallback, "a TrainerCallback", **{name: made})
        self.callbacks.append(made)
        own = {method for method in dir(TrainerCallback) if method.startswith("on_")} - set(CALLED)
        return [
            f"{type(made).__name__}.{method}: it is not called"
            for method in sorted(own)
            if getattr(type(made), method, None) is not getattr(TrainerCallback, method)
        ]

    def fire(self, event: str, **logs: Any) -> None:
        """Call a method of all callbacks, with the arguments that a TrainerCallback gets."""
        about = dict.fromkeys(("lr_scheduler", "train_dataloader", "eval_dataloader"))  # there are none
        about |= {"model": self.owner.model, "processing_class": self.owner.tokenizer, **logs}
        about["optimizer"] = self.owner.trainer.learner.optimizer
        for callback in self.callbacks:
            getattr(callback, event)(self.owner.args, self.state, self.control, **about)

    def after_iteration(self, trainer: Trainer, metrics: dict[str, float], samples: list[Any]) -> None:
        """Add TRL's names, and let the callbacks log."""
        del samples
        kl, reward = metrics.get("kl", metrics.get("log_ratio")), metrics.get(SHAPED, metrics["reward"])
        price = 0.0 if kl is None else metrics["kl_coef"] * kl
        named = {"objective/scores": reward, "objective/non_score_reward": -price}
        named |= {"objective/rlhf_reward": reward - price, "episode": metrics["iteration"] * trainer.rows}
        if kl is not None:
            named["objective/kl"] = kl
        if "entropy" in metrics:
            named["objective/entropy"] = metrics["entropy"] * metrics["length"]
        ours = {"policy/approxkl_avg": K3, "policy/clipfrac_avg": "clip_fraction", "val/ratio": "ratio_mean"}
        ours |= {"loss/policy_avg": "policy_loss", "loss/value_avg": "value_loss", "policy/entropy_avg": "entropy"}
        metrics |= named | {name: metrics[own] for name, own in ours.items() if own in metrics}
        self.state.global_step = int(metrics["iteration"])
        self.state.episode = named["episode"]  # type: ignore[attr-defined]  # TRL adds it
        self.state.epoch = self.state.num_train_epochs * self.state.global_step / self.state.max_steps
        self.state.log_history.append(dict(metrics))
        self.fire("on_log", logs=dict(metrics))
        self.fire("on_step_end")
        if self.control.should_training_stop and not self.asked_to_stop:
            self.asked_to_stop = True
            self.owner.say(["control.should_training_stop: the run goes on to its end"])


def statistics(metrics: Mapping[str, float], batch: Any, scores: Sequence[float]) -> dict[str, Any]:
    """Statistics of a step by TRL's names, from the metrics and the batch with its credit.

    Nothing of the KL without a reference.
    """
    rollout, mask = batch.rollout, batch.rollout.mask
    reference = batch.reference.logprobs
    beta, returns, acted = metrics["kl_coef"], batch.returns[mask], rollout.values[mask]
    error = float(((acted - returns) ** 2).mean())
    variance = float(returns.var())
    means = {"returns/mean": returns, "val/vpred": acted, "val/mean": acted}
    means["policy/advantages_mean"] = batch.advantages[mask]
    arrays, named = {"logprobs": rollout.logprobs}, {"objective/kl_coef": beta}
    if reference is not None:
        kls = (rollout.logprobs - reference) * mask
        means["mean_non_score_reward"], named["objective/kl"] = -beta * kls[mask], float(kls.sum(1).mean())
        arrays |= {"kl_dist": kls.sum(1), "ref_logprobs": reference}
    named |= {f"ppo/{name}": float(x.mean()) for name, x in means.items()}
    named |= {"ppo/returns/var": variance, "ppo/val/var": float(acted.var()), "ppo/val/error": error}
    named |= {"ppo/val/var_explained": 1 - error / variance if variance else math.nan}
    named |= {"ppo/mean_scores": sum(scores) / len(scores), "ppo/std_scores": float(torch.tensor(scores).std())}
    named |= {"objective/entropy": float((-rollout.logprobs * mask).sum(1).mean())}
    named |= {f"objective/{name}": x.cpu().numpy() for name, x in arrays.items()}
    for name, lengths in (("queries", rollout.prompt_mask.sum(1)), ("responses", mask.sum(1))):
        named[f"tokens/{name}_len_mean"] = float(lengths.float().mean())
        named[f"tokens/{name}_len_std"] = float(lengths.float().std())
        named[f"tokens/{name}_dist"] = lengths.float().cpu().numpy()
    ours = {"ppo/loss/policy": "policy_loss", "ppo/loss/value": "value_loss", "ppo/loss/total": "loss"}
    ours |= {"ppo/policy/entropy": "entropy", "ppo/policy/approxkl": K3, "ppo/learning_rate": "lr"}
    ours["ppo/policy/policykl"] = "approx_kl_k1"
    ours |= {"ppo/policy/clipfrac": "clip_fraction", "ppo/policy/ratio": "ratio_mean"}
    return named | {name: metrics[own] for name, own in ours.items() if own in metrics}
