"""Other projects' names and values: one table per project, for messages, docs, `tokencredit migrate` and the bridge.

`translation.Project` describes a table, and `translation.translate(trl.TRL, {"total_episodes": 2560, …})` makes
settings for `PPOConfig.from_dict` of theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokencredit.settings.projects.translation import Project


def projects() -> tuple[Project, ...]:
    """All tables; of two answers to one name that of the first counts."""
    from tokencredit.settings.projects.agents import AGENTS, ANY, OFFLINE
    from tokencredit.settings.projects.llama_factory import LLAMA_FACTORY, SWIFT
    from tokencredit.settings.projects.openrlhf import OPENRLHF
    from tokencredit.settings.projects.trl import OLD_TRL, TRL
    from tokencredit.settings.projects.verl import VERL

    return AGENTS, OFFLINE, TRL, OLD_TRL, ANY, LLAMA_FACTORY, SWIFT, VERL, OPENRLHF
