"""Settings whose keys have changed, so that old files and flags are answered with the new ones."""

from __future__ import annotations

from collections.abc import Iterable

MOVED = {
    "model.critic": "critic.kind",
    "model.critic_name": "critic.name",
    "model.value_head": "critic.head",
    "model.value_head_init": "critic.init",
    "model.value_head_gain": "critic.gain",
    "model.value_head_hidden_gain": "critic.hidden_gain",
    "model.detach_critic": "critic.detach",
    "optim.value_lr": "critic.lr",
    "ppo.value_coef": "critic.coef",
    "ppo.value_clip": "critic.clip",
    "ppo.critic_warmup": "critic.warmup",
    "agent.critic": "critic.kind",
}
"""The new key of each old one."""


def renamed(keys: Iterable[str]) -> str:
    """A message that names the new key of each old one among these; empty if there is none."""
    return ", ".join(f"{key} is now {MOVED[key]}" for key in keys if key in MOVED)
