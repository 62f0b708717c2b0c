"""Models, code and data sets that the runs of a sweep would read now."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tokencredit.control.vector_environments import registered_code
from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import Part
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.datasets import read_dataset
from tokencredit.text.data.prompts import load_prompts
from tokencredit.text.models.model_loading import load_tokenizer
from tokencredit.text.offline.examples import read_rows
from tokencredit.text.run_parts import named_parts, part_of


def current_parts(config: PPOConfig | ControlConfig | OfflineSettings) -> dict[str, Part]:
    """Descriptions of what a configuration names on this machine, by key, as a run's parts.json has them."""
    own = {"env.id": registered_code(config.env.id)} if isinstance(config, ControlConfig) else local_rows(config)
    named = named_parts(config) | own
    return {key: part for key, value in named.items() if (part := part_of(value)) is not None}


def local_rows(args: PPOConfig | OfflineSettings) -> dict[str, Any]:
    """Rows of the data sets on this machine that settings name, by key, as a run describes them."""
    if isinstance(args, PPOConfig):
        sources: dict[str, Any] = {"prompts": args.prompts, "eval": args.held_out_prompts()}
    else:
        sources = {"data": args.data, "eval": args.eval}
    rows, data = dict[str, Any](), sources.get("data")
    for group, source in sources.items():
        if source is None or source.dataset is None or not Path(source.dataset).expanduser().exists():
            continue
        tokenizer = partial(load_tokenizer, ModelConfig(**vars(args.model)))
        try:
            if data is not None:
                column = data.completion if hasattr(data, "completion") else data.chosen
                read: Any = [row.described() for row in read_rows(data, tokenizer(), column, source, group=group)]
            elif source.template is not None:
                read = load_prompts(source, tokenizer(), seed=args.seed, limit=None, group=group).rows
            else:
                read = read_dataset(source.dataset, split=source.split, config_name=source.config_name, group=group)
        except ConfigError:  # as of a model that is not here any more; a run to come says so itself
            continue
        rows[f"{group}.dataset"] = read
    return rows
