import os
from shutil import which

import pytest
from selenium import webdriver

from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RolloutConfig, RunConfig, UpdateConfig
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


@pytest.fixture(scope="session")  # set up before `run_folder`, so that nothing trains for a browser that is missing
def browser():
    """Debian's chromium, without a screen; without it, CI fails and other machines skip."""
    if not (which("chromium") and which("chromedriver")):
        missing = "no chromium or no chromedriver on the PATH; on Debian: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(which("chromedriver")))
    yield driver
    driver.quit()
