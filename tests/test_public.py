"""`import tokencredit as tc`: every public name is there, typed, listed, and imported on first use."""

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest

import tokencredit as tc
from helpers.commands import HEAVY, imported, python
from tokencredit import settings

CORE = [module.name for module in pkgutil.iter_modules(tc.core.__path__)]


def public(module):
    """The public functions and classes that a module defines; one whose parts are internal lists the others itself."""
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    listed = getattr(module, "__all__", own)
    return {name: value for name, value in own.items() if name in listed and name[0] != "_" and callable(value)}


@pytest.mark.parametrize("name", CORE)
def test_every_function_and_class_of_core_is_reachable_by_its_flat_name(name):
    module = importlib.import_module(f"tokencredit.core.{name}")
    assert public(module)
    for name, value in public(module).items():
        assert getattr(tc.core, name) is value, f"two modules of core have a name {name}, or core/__init__.py has none"
        assert name in dir(tc.core)


def test_every_flat_name_of_core_is_there():
    assert set(dir(tc.core)) == set(tc.core.__all__)
    for name in tc.core.__all__:
        assert getattr(tc.core, name) is not None


def test_type_checkers_see_every_module_of_core():
    tree = ast.parse(Path(tc.core.__file__).read_text(encoding="utf-8"))
    starred = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"}
    assert starred == {f"tokencredit.core.{name}" for name in CORE}


@pytest.mark.parametrize("name", tc.__all__)
def test_every_name_is_the_object_of_that_name(name):
    assert getattr(tc, name).__name__.rpartition(".")[2] == name
    assert name in dir(tc)


def test_type_checkers_see_every_name():
    tree = ast.parse(Path(tc.__file__).read_text(encoding="utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.asname: (node.module, alias.name) for node in typed.body[:-1] for alias in node.names}
    assert imported.keys() == set(tc.__all__)
    for name, (module, attribute) in imported.items():
        assert getattr(importlib.import_module(module), attribute) is getattr(tc, name)


def test_every_group_of_settings_is_public():
    found = set()
    for module in pkgutil.iter_modules(settings.__path__):
        found |= {
            name
            for name, value in public(importlib.import_module(f"tokencredit.settings.{module.name}")).items()
            if is_dataclass(value) and name.endswith(("Config", "Term"))
        }
    bases = {"SamplingConfig", "RewardTerm", "ModelTerm"}
    assert len(found) > 15
    assert found - bases <= set(tc.__all__)


def test_the_version_is_the_packages():
    assert tc.__version__ == importlib.metadata.version("tokencredit")
    assert "__version__" in dir(tc)


@pytest.mark.parametrize("package", [tc, tc.core])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'PPOConfg'"):
        _ = package.PPOConfg
    assert not hasattr(package, "__wrapped__")


def test_names_and_configurations_import_nothing_heavy():
    program = """
import tokencredit as tc
dir(tc), dir(tc.core), tc.__version__, tc.core.ESTIMATORS, tc.Callback, tc.ConfigError
tc.PPOConfig.from_dict({"optim.lr": 1e-5}), tc.ControlConfig.from_dict({})
"""
    assert imported(program, *HEAVY) == []


def test_the_package_itself_imports_nothing_of_its_own():
    script = "import sys, tokencredit\nprint([name for name in sys.modules if name.startswith('tokencredit.')])"
    assert python("-c", script).stdout == "[]\n"


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")],
)
def test_the_package_shortens_the_waits_of_openmp_unless_the_user_has_set_them(chosen, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    script = "import os, tokencredit\nprint(os.environ.get('GOMP_SPINCOUNT'))"
    assert python("-c", script).stdout.strip() == expected


def test_everything_public_has_a_docstring():
    for name in tc.__all__:
        assert inspect.getdoc(getattr(tc, name)), name


def test_a_dict_may_have_dotted_and_nested_keys():
    config = tc.PPOConfig.from_dict(
        {"optim.lr": 1e-5, "optim": {"eps": 1e-6}, "eval.text": "x", "reward": [{"function": "length"}]}
    )
    assert (config.optim.lr, config.optim.eps, config.optim.warmup) == (1e-5, 1e-6, tc.OptimConfig().warmup)
    assert config.held_out_prompts() == tc.PromptsConfig(text="x")
    assert config.reward == [tc.FunctionTerm(function="length")]
    assert tc.PPOConfig.from_dict({}) == tc.PPOConfig()
    assert tc.ControlConfig.from_dict({}) == tc.ControlConfig()
    assert tc.ControlConfig.from_dict({"env": {"kwargs": {"render": 1}}}).env.kwargs == {"render": 1}


def test_a_file_is_read_as_config_reads_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optim:\n  lr: 1e-5\nkl.coef: 0.5\n")
    for path in (file, str(file)):
        config = tc.PPOConfig.from_yaml(path)
        assert (config.optim.lr, config.kl.coef) == (1e-5, 0.5)
    file.write_text("steps: 64\n")
    assert tc.ControlConfig.from_yaml(file).steps == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({1: 2}, r"^1 is a key that YAML does not read as text"),
        ({"kl.coef": -1}, r"^kl.coef is -1.0; it must be at least 0$"),
        ({"kl.coef": 1, "kl": {"coef": 2}}, r"^kl.coef is given twice$"),
        ({"kl": 1, "kl.coef": 2}, r"^kl is given twice$"),
        ({"prompts.chat_template_kwargs": {"x": np.ones(1)}}, r"kwargs.x is array.*not a dict, "),
        ({"reward": [object()]}, r"^reward\[0\] is <object .*>, which is not a dict, list, str, "),
        ({"model": {"class_path": "os.system"}}, r"class_path"),
        ({"debug": True}, r"^unknown key debug"),
    ],
)
def test_mistakes_in_a_dict_are_answered_as_on_the_command_line(settings, message):
    with pytest.raises(tc.ConfigError, match=message):
        tc.PPOConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("PPOTrainer", {"seed": 1}, r"args is a dict; give a PPOConfig, such as PPOConfig\.from_dict"),
        ("PPOTrainer", "control", r"args is a ControlConfig; give a PPOConfig"),
        ("ControlTrainer", "text", r"args is a PPOConfig; give a ControlConfig"),
    ],
)
def test_arguments_of_another_kind_are_refused(kind, args, message):
    args = {"control": tc.ControlConfig, "text": tc.PPOConfig}[args]() if isinstance(args, str) else args
    with pytest.raises(tc.ConfigError, match=message):
        getattr(tc, kind)(args=args)


def test_a_dict_may_hold_paths_numbers_of_numpy_and_dataclasses():
    config = tc.PPOConfig.from_dict(
        {
            "run.dir": Path("runs/x"),
            "optim.lr": np.float64(1e-4),
            "rollout.batch_size": np.int64(8),
            "reward": [tc.FunctionTerm(function="length")],
        }
    )
    assert (config.run.dir, config.optim.lr, config.rollout.batch_size) == ("runs/x", 1e-4, 8)
    assert config.reward[0].function == "length"
    with pytest.raises(tc.ConfigError, match=r"^optim\.lr is <object .*>, which is not a dict"):
        tc.PPOConfig.from_dict({"optim.lr": object()})
