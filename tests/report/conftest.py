import pytest

from tokencredit.runs.config import ModelConfig, PPOConfig, RolloutConfig, RunConfig, UpdateConfig
from tokencredit.text.trainer import PPOTrainer


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A real run of the built-in world, with its report."""
    folder = tmp_path_factory.mktemp("reports") / "film <b>reviews"
    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8),
        ppo=UpdateConfig(epochs=2, minibatches=2),
        run=RunConfig(dir=str(folder), iterations=3, samples=4, trackers=[], show_every=0),
    )
    PPOTrainer(args=args).train()
    return folder
