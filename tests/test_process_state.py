"""Making and running a trainer leaves the process as it was."""

import os
import random
import warnings

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState

from helpers.configs import quiet, quiet_agent, text_config
from helpers.proofs import proofs
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.settings.control import (
    AgentConfig,
    AgentUpdateConfig,
    ControlConfig,
    EnvConfig,
    EpisodesConfig,
)
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig, UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer

pytestmark = pytest.mark.slow


def state():
    """Everything of the process that a trainer could change."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "filters": list(warnings.filters),
        "accelerate": dict(AcceleratorState._shared_state),
    }


def text(folder):
    return PPOTrainer(
        args=PPOConfig(
            model=ModelConfig(dtype="bfloat16", lora=LoraConfig(rank=2, dropout=0.5)),
            rollout=RolloutConfig(batch_size=4, max_new_tokens=4),
            ppo=UpdateConfig(epochs=1, minibatches=1),
            run=quiet(folder),
        ),
        reward_funcs=lambda completions, **columns: [random.random() + np.random.rand() for _ in completions],
    )


def control(folder, **env):
    return ControlTrainer(
        ControlConfig(
            env=EnvConfig(number=2, **env),
            agent=AgentConfig(hidden=[4]),
            steps=8,
            threads=torch.get_num_threads() + 1,
            ppo=AgentUpdateConfig(epochs=1, minibatches=1),
            eval=EpisodesConfig(episodes=1, videos=1),
            run=quiet_agent(folder),
        )
    )


@pytest.mark.parametrize("make", [text, pytest.param(control, marks=pytest.mark.proof)])
def test_a_trainer_leaves_the_process_as_it_was(make, tmp_path, monkeypatch):
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    # Libraries fill caches and variables of their own when they are first used.
    make(tmp_path / "first").train()
    before = state()
    trainer = make(tmp_path / "second")
    made = state()
    trainer.train()
    for name, now in state().items():
        assert made[name] == before[name], f"making the trainer changed {name}"
        assert now == before[name], f"training changed {name}"


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
}


def rewards(folder):
    trainer = PPOTrainer(args=text_config(folder / "run"))
    return trainer.train().last, trainer.policy.critic.head[0].weight.dtype


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return rewards(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("mode", ["inference_mode", "autocast", "dtype", *proofs("no_grad", "device")])
def test_a_run_does_not_depend_on_the_modes_and_defaults_of_its_caller(mode, alone, tmp_path):
    if mode == "dtype":
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert rewards(tmp_path) == alone
            assert torch.get_default_dtype() == torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        with MODES[mode]():
            assert rewards(tmp_path) == alone


def test_mujocos_warning_handler_is_restored(tmp_path):
    mujoco = pytest.importorskip("mujoco")
    before = mujoco.get_mju_user_warning()
    args = ControlConfig(
        env=EnvConfig(id="InvertedPendulum-v5", number=1),
        agent=AgentConfig(hidden=[4]),
        steps=8,
        ppo=AgentUpdateConfig(epochs=1, minibatches=1),
        eval=EpisodesConfig(episodes=0),
        run=quiet_agent(tmp_path),
    )
    ControlTrainer(args).train()
    assert mujoco.get_mju_user_warning() is before


def test_runs_of_two_dtypes_work_in_one_process(tmp_path):
    """Accelerate would refuse a second number format in one process."""
    for dtype in ("bfloat16", "float32", "bfloat16"):
        args = PPOConfig(model=ModelConfig(dtype=dtype), run=RunConfig(dir=str(tmp_path / "run"), trackers=[]))
        assert PPOTrainer(args=args).pipeline.precision.dtype == dtype


def test_a_seed_gives_the_same_critic_whatever_was_drawn_before(tmp_path):
    heads = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        args = PPOConfig(model=ModelConfig(dtype="float32"), run=RunConfig(dir=str(tmp_path), trackers=[]))
        heads.append(PPOTrainer(args=args).policy.critic.head[0].weight)
    assert torch.equal(*heads)


def test_an_environment_that_draws_from_the_global_generator_follows_the_seed(tmp_path):
    draws = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        trainer = control(tmp_path / str(seed))
        iteration = trainer.iteration

        def look(number, iteration=iteration):
            draws.append(float(torch.rand(())))
            return iteration(number)

        trainer.iteration = look
        trainer.train()
    assert draws[0] == draws[1]
