"""A pickle that acts when it is read is planted wherever a file is read, and never goes off."""

import json
import pickle
import shutil
from pathlib import Path

import pyarrow
import pytest
import torch
from datasets import Dataset
from pyarrow import parquet
from safetensors.torch import load_file

from helpers.files import sign
from helpers.models import changed_weights, copy_weights
from tokencredit.cli import main
from tokencredit.control.agent_evaluation import AGENT_FILE, load_agent
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.runs.checkpoint import DamagedCheckpoint, read_checkpoint
from tokencredit.settings.control import (
    AgentCriticConfig,
    AgentRunConfig,
    AgentUpdateConfig,
    ControlConfig,
    EpisodesConfig,
)
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.text.data.datasets import column_values, read_dataset
from tokencredit.text.models.critic import HEAD_FILE
from tokencredit.text.models.model_loading import load_language_model, resolve
from tokencredit.text.models.run_models import build_policy, save_policy
from tokencredit.text.rewards.ready_made import similarity
from tokencredit.text.rewards.reward_models import load

pytestmark = pytest.mark.slow

REFUSED = "cannot load a (language model|classifier) from|is a pickle, which can run code and is not read"
POLICY, SENTIMENT = resolve("builtin:reviews", "policy"), resolve("builtin:reviews", "sentiment")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def bomb(tmp_path):
    """The bytes of a bomb, which is shown to work before the test and not to have gone off after it."""
    marker = tmp_path / "it-ran"
    data = pickle.dumps(Bomb(marker))
    pickle.loads(data).close()
    assert marker.exists(), "it is a bomb"
    marker.unlink()
    yield data
    assert not marker.exists(), "the bomb went off"


def saved(bomb, file, tensors=None):
    """Plant a bomb among tensors in PyTorch's own format, which is a pickle too; and show that it is one."""
    marker = pickle.loads(bomb)
    marker.close()
    name = Path(marker.name)
    torch.save({**(tensors or {}), "bomb": Bomb(name)}, file)
    name.unlink()
    with file.open("rb") as opened:  # by its name PyTorch would take another reader for *.safetensors
        torch.load(opened, weights_only=False)["bomb"].close()
    assert name.exists(), "it is a bomb"
    name.unlink()


def complaint(action):
    """What an action is refused with, if it is."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def without_weights(folder, source):
    """A model's folder without the weights, and the weights."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return weights


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.safetensors", "model.bin", "model.pt"]
)
def test_pickled_weights_of_a_policy_and_a_critic_are_refused(bomb, name, tmp_path):
    folder = tmp_path / "model"
    weights = without_weights(folder, POLICY)
    saved(bomb, folder / name, weights)
    if "-of-" in name:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=REFUSED):
        load_language_model(ModelConfig(name=str(folder)))
    lm, tokenizer = load_language_model(ModelConfig())
    with pytest.raises(ConfigError, match=REFUSED):
        build_policy(lm, tokenizer, ModelConfig(), CriticConfig(kind="separate", name=str(folder)))


def test_pickled_weights_of_an_adapter_are_refused(bomb, tmp_path):
    pytest.importorskip("peft")
    args = ModelConfig(lora=LoraConfig(rank=2))
    lm, tokenizer = load_language_model(args)
    policy, _ = build_policy(lm, tokenizer, args, CriticConfig())
    save_policy(tmp_path / "adapter", policy, tokenizer)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    load_language_model(ModelConfig(name=str(tmp_path / "adapter")))
    saved(bomb, tmp_path / "adapter" / "adapter_model.bin", load_file(file))
    file.unlink()
    with pytest.raises(ConfigError, match="cannot load a language model from"):
        load_language_model(ModelConfig(name=str(tmp_path / "adapter")))
    shutil.copy(tmp_path / "adapter" / "adapter_model.bin", file)
    with pytest.raises(ConfigError, match="cannot load a language model from"):
        load_language_model(ModelConfig(name=str(tmp_path / "adapter")))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickled_weights_of_a_classifier_are_refused(bomb, name, tmp_path):
    weights = without_weights(tmp_path / "model", SENTIMENT)
    saved(bomb, tmp_path / "model" / name, weights)
    with pytest.raises(ConfigError, match=REFUSED):
        load(str(tmp_path / "model"), "cpu")


def test_pickled_weights_and_foreign_modules_of_an_embedder_are_refused(bomb, tmp_path):
    """Its list of modules may name classes, and the last of them may have weights of its own."""
    library = pytest.importorskip("sentence_transformers")
    folder, refused = tmp_path / "embedder", "cannot load a sentence embedding model from"
    library.SentenceTransformer(SENTIMENT, device="cpu").save(str(folder))
    modules = json.loads((folder / "modules.json").read_text())
    dense = folder / "2_Dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"in_features": 8, "out_features": 8}))
    saved(bomb, dense / "pytorch_model.bin")
    for kind in ("sentence_transformers.models.Dense", "planted.Module"):
        (folder / "planted.py").write_text(f"import pickle\npickle.loads({bomb!r})\nclass Module: pass\n")
        module = {"idx": 2, "name": "2", "path": "2_Dense", "type": kind}
        (folder / "modules.json").write_text(json.dumps([*modules, module]))
        with pytest.raises(ConfigError, match=refused):
            similarity(str(folder))
    (folder / "modules.json").write_text(json.dumps(modules))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    saved(bomb, folder / "pytorch_model.bin", weights)
    with pytest.raises(ConfigError, match=refused):
        similarity(str(folder))


@pytest.mark.parametrize("source", [POLICY, SENTIMENT])
def test_pickles_beside_a_models_weights_are_not_read(bomb, source, tmp_path):
    """As trainers leave them there; and tokenizer files of kinds that this tokenizer does not have."""
    shutil.copytree(source, tmp_path / "model")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "pytorch_model.bin"):
        saved(bomb, tmp_path / "model" / name)
    for name in ("tokenizer.pkl", "tokenizer.model", "vocab.pkl", "vocab.bin", "spiece.model", "conftest.py"):
        (tmp_path / "model" / name).write_bytes(bomb)
    models = []
    for folder in (source, tmp_path / "model"):
        if source == POLICY:
            models.append(load_language_model(ModelConfig(name=str(folder)))[0])
        else:
            models.append(load(str(folder), "cpu")[0])
    assert changed_weights(models[1], copy_weights(models[0])) == set()


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"],
)
def test_pickles_in_place_of_tokenizer_files_are_not_read(bomb, name, tmp_path):
    shutil.copytree(POLICY, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(bomb)
    needed = name not in ("special_tokens_map.json", "generation_config.json")
    said = complaint(lambda: load_language_model(ModelConfig(name=str(tmp_path / "model"))))
    assert str(tmp_path / "model") in said or not (said or needed)


@pytest.mark.parametrize(("source", "kind"), [(POLICY, "AutoModelForCausalLM"), (SENTIMENT, None)])
def test_code_in_a_models_folder(bomb, source, kind, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    (folder / "planted.py").write_text(f"import pickle\npickle.loads({bomb!r})\nclass Planted: pass\n")
    config = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config |= {"model_type": "planted", "auto_map": dict.fromkeys(names, "planted.Planted")}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="cannot load a"):
        load_language_model(ModelConfig(name=str(folder))) if kind else load(str(folder), "cpu")
    shutil.copy(Path(source) / "config.json", folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", "planted.Planted"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    said = complaint(lambda: load_language_model(ModelConfig(name=str(folder))) if kind else load(str(folder), "cpu"))
    assert "trust_remote_code" in said or not said  # it may load, with the class that tokenizer.json stands for


def test_a_critics_head_and_an_agent(bomb, tmp_path):
    loaded = load_language_model(ModelConfig())
    args, separate = ModelConfig(name=str(tmp_path / "policy")), CriticConfig(kind="separate")
    policy, _ = build_policy(*loaded, ModelConfig(), separate)
    save_policy(tmp_path / "policy", policy, loaded[1], tmp_path / "critic")
    trunk = tmp_path / "critic" / "model.safetensors"
    weights = trunk.read_bytes()
    saved(bomb, trunk, policy.critic.trunk.state_dict())
    with pytest.raises(ConfigError, match="cannot load a language model from"):
        build_policy(*loaded, args, separate)
    trunk.write_bytes(weights)
    saved(bomb, tmp_path / "critic" / HEAD_FILE, policy.critic.head.state_dict())
    with pytest.raises(ConfigError, match=HEAD_FILE):
        build_policy(*loaded, args, separate)
    pytest.importorskip("gymnasium")
    saved(bomb, tmp_path / AGENT_FILE)
    with pytest.raises(ConfigError, match=AGENT_FILE):
        load_agent(tmp_path, ControlConfig())


def planted_table(bomb):
    """A table whose column claims to be of pickled types, as pyarrow once wrote them, with a bomb for a type."""
    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": bomb}
    field = pyarrow.field("prompt", pyarrow.string(), metadata=about)
    return pyarrow.table([["a", "b"]], schema=pyarrow.schema([field], metadata={b"pandas": bomb}))


def test_data_sets(bomb, tmp_path):
    for name in ("rows.pkl", "rows.pickle", "rows.pt", "rows.npy"):
        (tmp_path / name).write_bytes(bomb)
        with pytest.raises(ConfigError, match="must end in one of"):
            read_dataset(str(tmp_path / name))
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.parquet"):
        (tmp_path / name).write_bytes(bomb)
        with pytest.raises(ConfigError, match=name):
            read_dataset(str(tmp_path / name))
    parquet.write_table(planted_table(bomb), tmp_path / "rows.parquet")
    assert [v for some in column_values(read_dataset(str(tmp_path / "rows.parquet")), "prompt") for v in some]


def test_pickles_in_saved_data_sets_are_refused(bomb, tmp_path):
    folder = tmp_path / "saved"
    Dataset.from_dict({"prompt": ["a", "b"]}).save_to_disk(folder)
    table = planted_table(bomb)
    file = next(folder.glob("*.arrow"))
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert [v for some in column_values(read_dataset(str(folder)), "prompt") for v in some] == ["a", "b"]
    for name in ("state.json", "dataset_info.json", file.name):
        (folder / name).write_bytes(bomb)
        with pytest.raises(ConfigError, match="cannot read this saved data set"):
            read_dataset(str(folder))


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "choices.json", "metrics.jsonl", "samples.jsonl", "summary.json", "audit.json", "report.html"],
)
@pytest.mark.parametrize("command", ["report", "doctor", "generate", "evaluate", "play"])
def test_pickles_among_a_runs_files_are_not_read(bomb, command, name, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "policy").mkdir(parents=True)
    (run / "config.yaml").write_text("env: {id: CartPole-v1}\n" if command == "play" else "seed: 1\n")
    (run / "metrics.jsonl").write_text('{"iteration": 1, "reward": 1.0}\n')
    (run / name).write_bytes(bomb + b"\n")
    for file in ("model.safetensors", "pytorch_model.bin", AGENT_FILE, "config.json", "tokenizer.json"):
        (run / "policy" / file).write_bytes(bomb)
    code = main([command, str(run)])
    assert code == 2 or command in ("report", "doctor")
    assert "Traceback" not in capsys.readouterr().err


def test_pickles_in_a_checkpoint_are_refused(bomb, tmp_path):
    """Both as found, and with a manifest that fits the bomb."""
    run = AgentRunConfig(dir=str(tmp_path / "run"), iterations=1, trackers=[])
    args = ControlConfig(
        run=run,
        steps=8,
        critic=AgentCriticConfig(epochs=1),
        ppo=AgentUpdateConfig(minibatches=1),
        eval=EpisodesConfig(episodes=0),
    )
    ControlTrainer(args).train()
    whole = tmp_path / "run" / "checkpoints" / "000001"
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    assert [Path(name).suffix for name in names] == [".json", ".json", ".safetensors", ".json", ".safetensors"], names
    for name in names:
        for plant in (lambda file: file.write_bytes(bomb), lambda file: saved(bomb, file)):
            for signed in (False, True):
                shutil.rmtree(tmp_path / "planted", ignore_errors=True)
                shutil.copytree(whole, tmp_path / "planted")
                plant(tmp_path / "planted" / name)
                if signed and name != "manifest.json":
                    sign(tmp_path / "planted")
                with pytest.raises(DamagedCheckpoint, match=Path(name).parts[0].removesuffix(".safetensors")):
                    read_checkpoint(tmp_path / "planted", Processes())
