"""YAML files of plain settings, read so that no mistake in them passes for something else."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import ConfigError
from tokencredit.settings.yaml import check_yaml


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which builds plain values alone, and refuses two things that others pass over."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping; raises `yaml.YAMLError` for a key that stands in it twice, or that names a class."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            if key.value == "class_path":  # jsonargparse would import what it names
                raise yaml.constructor.ConstructorError(None, None, "class_path is no setting", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# 1e-5 is a number to everyone but YAML 1.1, which wants 1.0e-5.
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(file: Path) -> dict[str, Any]:
    """A file of plain settings; `ConfigError` says where there are none."""
    try:
        text = file.read_text(encoding="utf-8")
        check_yaml(text)
        found = yaml.load(text, Loader)  # a safe loader
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a number too long, a month 13, no UTF-8
        told = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise ConfigError(f"{file}: {told}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds no settings")
    return found
