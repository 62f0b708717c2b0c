"""Renamed settings, so that old files and flags get a message with the new keys."""

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
    "advantage.whiten_over": "advantage.whiten",
}
"""Old keys and their new names."""


def renamed(keys: Iterable[str]) -> str:
    """A message with the new name of each old key among these; empty if there is none."""
    return ", ".join(f"{key} is now {MOVED[key]}" for key in keys if key in MOVED)
