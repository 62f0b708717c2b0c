import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from helpers.commands import refused
from helpers.configs import quiet, text_config
from helpers.rewards import vowels
from tokencredit.cli import main
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config, read_source
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, OptimConfig, UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.inspect.inspection import inspect_run


def train(folder, name, reward=None, **groups):
    """A run of one iteration, with a large learning rate."""
    config = text_config(
        folder,
        1,
        **{
            "model": ModelConfig(name=str(name), dtype="float32"),
            "prompts": PromptsConfig(text="The film was"),
            "rollout": RolloutConfig(batch_size=8, max_new_tokens=6),
            "ppo": UpdateConfig(epochs=2, minibatches=1),
            "optim": OptimConfig(lr=0.01),
            "run": quiet(folder),
        }
        | groups,
    )
    PPOTrainer(args=config, **({} if reward is None else {"reward_funcs": reward})).train()
    return folder


def inspect(run, **options):
    return inspect_run(read_source(str(run)), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folders):
    critic = CriticConfig(prefix_every=0)
    return train(tmp_path_factory.mktemp("run") / "full", model_folders["gpt2"], critic=critic)


@pytest.fixture(scope="module")
def lora(tmp_path_factory, model_folders):
    model = ModelConfig(name=str(model_folders["gpt2"]), dtype="float32", lora=LoraConfig(rank=2))
    without = {"critic": CriticConfig(kind="none"), "advantage": AdvantageConfig(estimator="reward_to_go")}
    return train(tmp_path_factory.mktemp("run") / "lora", model_folders["gpt2"], model=model, **without)


def test_the_command_writes_file_and_page(run, capsys):
    assert main(["inspect", str(run), "--prompt", "This movie was", "--seed", "3"]) == 0
    sentence, page = capsys.readouterr().out.splitlines()
    result = json.loads((run / "inspect.json").read_text())
    assert (sentence, page) == (result["answer"]["sentence"], str(run / "inspect.html"))
    assert "<html" in (run / "inspect.html").read_text(encoding="utf-8")
    assert (result["run"], result["seed"]) == ("full", 3)
    assert result["prompt"] == "This movie was"
    assert "".join(result["tokens"]) == "This movie was" + result["completion"]
    assert result["model"] == {"layers": 2, "heads": 4, "width": 32, "family": "gpt2", "parameters": 93056}
    assert abs(result["question"]["change"]) > 0
    assert isinstance(result["critic"]["score"], float)
    assert max(map(abs, result["attribution"]["error"].values())) < 1e-4


@pytest.fixture(scope="module")
def own(run):
    """What is seen in the run."""
    return inspect(run)


def test_the_same_seed_gives_the_same_file(run, own):
    assert inspect(run) | {"seconds": None} == own | {"seconds": None}
    assert inspect(run, seed=2)["completion"] != own["completion"]


def test_words(run):
    result = inspect(run, up=["bad", "dull"], down=["good"])
    assert result["question"]["up"] == [" bad", " dull"]
    assert result["question"]["down"] == [" good"]


def test_an_adapter_is_merged_and_a_run_without_critic_has_no_critics_lens(lora):
    assert (lora / "policy" / "adapter_config.json").is_file()
    result = inspect(lora)
    assert result["critic"] is None
    moved = {x["name"]: x["effective_rank"] for x in result["weights"]["modules"] if x["relative_norm"]}
    assert "layer 1 mlp.c_fc" in moved
    assert all(1 <= rank < 2.01 for rank in moved.values())
    assert {x["name"] for x in result["weights"]["modules"]} - set(moved) == {"wte", "wpe"}


def test_a_separate_critic_has_a_trunk_of_its_own_and_a_reward_from_python_gives_no_score(tmp_path, model_folders):
    critic = CriticConfig(kind="separate", layers=1, prefix_every=0)
    critic = inspect(train(tmp_path / "run", model_folders["llama"], reward=vowels, critic=critic))["critic"]
    assert critic["layers"] == ["embedding", "1"]
    assert critic["score"] is None
    assert "the critic's own trunk" in critic["note"]
    assert "no score: the reward came from Python (reward_funcs)" in critic["note"]


def test_against_another_run_or_model(run, own, lora, model_folders):
    against_run, against_model = inspect(run, against=str(lora)), inspect(run, against=str(model_folders["gpt2"]))
    assert against_run["base"] == str(lora)
    assert against_run["question"]["tuned"] != against_run["question"]["base"]
    same = ("question", "lens", "attribution", "patching", "weights")
    assert {name: against_model[name] for name in same} == {name: own[name] for name in same}
    itself = inspect(run, against=str(run))
    assert itself["answer"]["sentence"] == "No weight changed: the two models are the same."


def test_mistakes_are_answered_in_a_line(run, model_folders, tmp_path, capsys):
    assert "--up 'unbelievable' is " in refused(capsys, "inspect", str(run), "--up", "unbelievable")
    assert "needs a model of the same architecture" in refused(
        capsys, "inspect", str(run), "--against", str(model_folders["llama"])
    )
    assert "--against is empty" in refused(capsys, "inspect", str(run), "--against", "")
    assert "' bad' is in both" in refused(capsys, "inspect", str(run), "--up", "bad", "--down", "bad")
    assert "config.yaml" in refused(capsys, "inspect", str(tmp_path))


def test_another_vocabulary_is_refused(run, model_folders, tmp_path, capsys):
    other = shutil.copytree(model_folders["gpt2"], tmp_path / "other")
    file = json.loads((other / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(file))
    assert "has another vocabulary than" in refused(capsys, "inspect", str(run), "--against", str(other))


def test_the_only_matrix_that_changed_is_the_answer(run, tmp_path):
    """The answer to a planted change: only the second MLP's last matrix differs from the base."""
    copy = shutil.copytree(run, tmp_path / "planted")
    base = load_file(read_config(run / "config.yaml", PPOConfig).model.name + "/model.safetensors")
    base["transformer.h.1.mlp.c_proj.weight"] = base["transformer.h.1.mlp.c_proj.weight"] * 2
    save_file(base, copy / "policy" / "model.safetensors", {"format": "pt"})
    answer = inspect(copy)["answer"]
    assert answer["top"][0]["name"] == "layer 2 mlp"
    assert answer["top"][0]["share"] == pytest.approx(1, abs=1e-3)
    assert "Layer 2 MLP carries 100 % of the change" in answer["sentence"]
    assert all(share == pytest.approx(1, abs=1e-2) for share in answer["top"][0]["others"] if share is not None)
