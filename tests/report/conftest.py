import json
import shutil

import pytest

from tokencredit.report.page import write_report
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, AuditConfig, RunConfig, UpdateConfig
from tokencredit.text.audit.completion_auditor import CompletionAuditor
from tokencredit.text.ppo_trainer import PPOTrainer


@pytest.fixture(scope="session")
def trainer(tmp_path_factory):
    """The trainer of a real run of the built-in world, which is over."""
    folder = tmp_path_factory.mktemp("reports") / "film <b>reviews"
    args = PPOConfig(
        seed=2,  # its audit is large enough to tell
        model=ModelConfig(dtype="float32"),
        advantage=AdvantageConfig(lam=0.95),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8),
        ppo=UpdateConfig(epochs=2, minibatches=2),
        run=RunConfig(dir=str(folder), iterations=3, samples=4, trackers=[], show_every=0),
    )
    trainer = PPOTrainer(args=args)
    trainer.train()
    return trainer


@pytest.fixture
def view(browser):
    """A function that sets the width of pages and their colour scheme; as before at the end."""

    def chosen(width, scheme="light", height=1000):
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        # An open page hears of it with the next frame, and draws its curves anew.
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    yield chosen
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture(scope="session")
def _place(tmp_path_factory):
    return tmp_path_factory.mktemp("page") / "place"


@pytest.fixture
def place(_place):
    """An empty folder, at the same path in each test: Chromium compiles Plotly's script once per address of a page."""
    shutil.rmtree(_place, ignore_errors=True)
    _place.mkdir()
    return _place


@pytest.fixture(scope="session")
def run_folder(trainer):
    """Its folder, with its report."""
    return trainer.record.folder.path


@pytest.fixture(scope="session")
def audited_folder(trainer, tmp_path_factory):
    """The same with a real audit of its last policy."""
    folder = tmp_path_factory.mktemp("audited") / "run"
    shutil.copytree(trainer.record.folder.path, folder)
    settings = AuditConfig(every=1, completions=6, continuations=8, states=5)
    audit = CompletionAuditor(trainer.pipeline, trainer.credit, trainer.prompts, settings, group=4).audit(3)
    found = audit.record(3, settings, trainer.pipeline)
    (folder / "audit.json").write_text(json.dumps(found, allow_nan=False))
    write_report(folder)
    return folder
