"""What a sweep file asks for: the runs, and the mistakes that are found before any of them begins."""

import doctest
import json
import re
import shutil

import pytest
import yaml

from tokencredit.control.vector_environments import registered_code
from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import describe
from tokencredit.settings.parts import plain
from tokencredit.settings.reader import grouped
from tokencredit.settings.run_kind import TEXT
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import load_prompts
from tokencredit.text.models.model_loading import load_tokenizer, resolve
from tokencredit.text.offline.offline_setup import load_examples, load_model
from tokencredit.text.run_parts import part_of, parts_of
from tokencredit.tools.sweep import sweep_file as sweep
from tokencredit.tools.sweep.launch import start
from tokencredit.tools.sweep.sweep_file import (
    combinations,
    expand,
    first_seeds,
    merged,
    read_sweep,
    refuse_broken,
    refuse_changed,
)

PLAIN = {"kind": "control", "dir": "out", "seeds": [1, 2], "base": {"steps": 64, "optim.lr": 0.1}}
ONE = {"variants": {"plain": {}}}


def asked(**keys):
    return expand(PLAIN | ONE | keys)


def test_examples_in_docstrings():
    assert doctest.testmod(sweep).failed == 0


def test_variants_are_laid_over_the_base_and_run_with_each_seed():
    variants = {"one": {}, "two": {"critic": {"lr": 0.2}, "advantage.lam": 0}}
    runs = asked(variants=variants)
    assert [run.name for run in runs] == ["one/seed-1", "one/seed-2", "two/seed-1", "two/seed-2"]
    assert [str(run.folder) for run in runs[:2]] == ["out/one/seed-1", "out/one/seed-2"]
    one, two = runs[1].config, runs[3].config
    assert (one.optim.lr, one.critic.lr, one.steps, one.seed) == (0.1, 2.5e-4, 64, 2)
    assert (two.optim.lr, two.critic.lr, two.advantage.lam) == (0.1, 0.2, 0.0)
    assert two.run.dir == "out/two/seed-2"
    assert {key for key, value in vars(one).items() if value != getattr(two, key)} == {"critic", "advantage", "run"}


def test_the_first_seeds_of_every_variant_are_a_smaller_study():
    runs = asked(variants={"one": {}, "two": {}}, seeds=[7, 3, 5])
    assert [run.name for run in first_seeds(runs, 2)] == ["one/seed-7", "one/seed-3", "two/seed-7", "two/seed-3"]
    assert first_seeds(runs, None) == runs


def test_a_grid_is_every_combination():
    grid = {"advantage.lam": [0, 0.95], "optim.lr": [1e-3], "agent.hidden": [[64, 64], [8]]}
    found = combinations(grid)
    assert list(found) == [
        "lam=0,lr=0.001,hidden=64-64",
        "lam=0,lr=0.001,hidden=8",
        "lam=0.95,lr=0.001,hidden=64-64",
        "lam=0.95,lr=0.001,hidden=8",
    ]
    assert found["lam=0,lr=0.001,hidden=8"] == {"advantage.lam": 0, "optim.lr": 1e-3, "agent.hidden": [8]}
    assert list(combinations({"rollout.temperature": [1], "eval.temperature": [2]})) == [
        "rollout.temperature=1,eval.temperature=2"
    ]
    assert list(combinations({"env.kwargs.step": [-0.04, 0.04, "-a."]})) == ["step=-0.04", "step=0.04", "step=a"]
    plain = {key: value for key, value in PLAIN.items() if key != "variants"}
    runs = expand(plain | {"grid": grid})
    assert len(runs) == 8
    assert runs[-1].config.agent.hidden == [8]
    assert runs[0].config.optim.lr == 1e-3


def test_a_sweep_is_of_language_models_unless_it_says_otherwise():
    (run,) = expand({"dir": "out", "seeds": [1], "variants": {"a": {"kl.coef": 0.1}}})
    assert run.run_kind is TEXT
    assert run.config.kl.coef == 0.1


def test_dotted_and_nested_keys_are_the_same():
    settings = {"model.lora.rank": 1, "model": {"lora": {"alpha": 2}, "name": "a"}, "env.kwargs.x": 3}
    same = {"model": {"lora": {"rank": 1, "alpha": 2}, "name": "a"}, "env": {"kwargs": {"x": 3}}}
    assert grouped(PPOConfig, settings.items()) == same
    for twice in (
        {"kl.coef": 1, "kl": {"coef": 2}},
        {"env.kwargs.x": 1, "env": {"kwargs.x": 2}},
        {"kl": None, "kl.coef": 1},
    ):
        with pytest.raises(ConfigError, match=r"is given twice"):
            grouped(PPOConfig, twice.items())
    # A key below a value that has none.
    with pytest.raises(ConfigError, match=r"^unknown key seed\.x"):
        PPOConfig.from_dict({"seed": 1, "seed.x": 2})
    with pytest.raises(ConfigError, match=r"^unknown key model\.name\.o"):
        PPOConfig.from_dict({"model.name": "foo", "model.name.o": 2})
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        PPOConfig.from_dict({"env": {"kwargs": None}, "env.kwargs.size": 2})
    assert merged({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}}


def test_a_base_file_lies_beside_the_sweep_file(tmp_path):
    (tmp_path / "base.yaml").write_text("steps: 32\noptim: {lr: 1e-2}\nenv.kwargs: {x: 1e-3}\n")
    file = tmp_path / "sweep.yaml"
    file.write_text("{kind: control, dir: out, seeds: [3], base: base.yaml, grid: {critic.lr: [1e-3, .5]}}")
    runs = read_sweep(file)
    assert [run.name for run in runs] == ["lr=0.001/seed-3", "lr=0.5/seed-3"]
    assert (runs[0].config.steps, runs[0].config.optim.lr) == (32, 0.01)
    assert runs[0].config.env.kwargs == {"x": 0.001}, "1e-3 is a number, as in --config"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seed": [1]}, "unknown key seed; a sweep has kind, base, grid"),
        ({"kind": "games"}, "kind is 'games'; it must be one of text, control, sft"),
        ({"dir": None}, "dir is None; give the folder"),
        ({"seeds": []}, r"seeds is \[\]; it must be a list of at least one"),
        (
            {"seeds": [1, True]},
            r"seeds is \[1, True\]; it must be a list of at least one whole number, each at least 0",
        ),
        ({"seeds": [-1]}, r"seeds is \[-1\]"),
        ({"seeds": [1, 2, 1]}, "each may appear only once"),
        ({"grid": {"steps": [2]}}, "give grid or variants, one of them, not both"),
        ({"base": 3}, "base is 3; it must be a mapping"),
        ({"variants": {}}, "variants is empty"),
        ({"variants": {"..": {}}}, r"variants has '\.\.', which cannot name a folder"),
        ({"variants": {"a/b": {}}}, "variants has 'a/b'"),
        ({"variants": {"-a": {}}}, "variants has '-a'"),
        ({"variants": {"comparison": {}}}, "not comparison"),
        ({"variants": {False: {}}}, "variants has False, which YAML does not read as text; quote it"),
        ({"variants": {"a": 3}}, "variants.a is 3; it must be a mapping"),
        ({"variants": {"a": {}, "b": {"optim.lrr": 1}}}, r"^variant b: unknown key optim.lrr; did you mean optim.lr\?"),
        ({"variants": {"b": {"config": "x.yaml"}}}, "variant b: unknown key config; see --print_config"),
        ({"variants": {"b": {"optim.lr": -1}}}, "variant b: optim.lr is -1.0; it must be above 0"),
        ({"variants": {"b": {"steps": None}}}, "variant b: steps is null; it needs a value"),
        ({"variants": {"b": {"seed": 3}}}, "variant b: seed is set by the sweep; use its key seeds instead"),
        ({"variants": {"b": {"run": {"dir": "x"}}}}, "variant b: run.dir is set by the sweep; use its key dir"),
        ({"variants": {"b": {"run.allow_changed": ["env.id"]}}}, "variant b: run.allow_changed would mix runs of"),
        ({"variants": {"b": {"optim.lr": 1, "optim": {"lr": 2}}}}, "variant b: optim.lr is given twice"),
        ({"variants": {"b": {"advantage.estimator": "group_relative"}}}, "variant b: .*; it must be one of gae, td"),
        ({"variants": {"b": {"python": {"callbacks": ["f"]}}}}, "variant b: a part of this run was given as an object"),
        ({"variants": {"b": {"python": {"a": 1}}}}, r"variant b: a part of this run .* holds \(a: 1\)"),
        ({"kind": "sft", "base": {}}, "variant plain: data.dataset is missing; give a .jsonl"),
    ],
)
def test_mistakes_are_named(keys, message):
    with pytest.raises(ConfigError, match=message):
        asked(**keys)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid is empty"),
        ({"optim.lr": 1}, "grid.optim.lr is 1; it must be a list"),
        ({"optim.lr": []}, r"grid.optim.lr is \[\]"),
        ({"optim.lr": [1, 1]}, "grid gives the name lr=1 twice"),
        ({"env.id": ["a/b", "a b"]}, "grid gives the name id=a-b twice"),
        ({"env.id": ["x" * 200]}, "too long"),
    ],
)
def test_mistakes_in_a_grid_are_named(grid, message):
    with pytest.raises(ConfigError, match=message):
        combinations(grid)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"clasifier": "x"}, r"unknown key reward\[0\].clasifier; did you mean reward\[0\].classifier"),
        (3, r"reward\[0\] is 3; it must hold keys"),
    ],
)
def test_mistakes_in_the_terms_of_a_reward_are_named(term, message):
    with pytest.raises(ConfigError, match=message):
        expand(PLAIN | {"kind": "text", "base": {}, "variants": {"a": {"reward": [term]}}})


def test_a_reward_may_be_of_any_kind():
    terms = [{"function": "length", "kwargs": {"unit": "words"}}, {"reward_model": "rm", "weight": 2.0}]
    (run,) = expand(PLAIN | {"kind": "text", "base": {"reward": terms}, "seeds": [1], "variants": {"a": {}}})
    function, model = run.config.reward
    assert (function.function, function.kwargs) == ("length", {"unit": "words"})
    assert (model.reward_model, model.weight) == ("rm", 2.0)


def test_neither_grid_nor_variants_is_refused():
    with pytest.raises(ConfigError, match=r"give grid or variants, one of them$"):
        expand(PLAIN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: text\nvariants:\n  a: {}\n  a: {}\n", "a is given twice .*line 4"),
        ("kind: !!python/object/apply:os.system ['touch made']\n", "is a tag; configurations hold plain values"),
        ("base:\n  ? [kl, coef]\n  : 1\n", "found unhashable key .*line 2"),
        ("kind: [\n", r"sweep.yaml: .*line 2"),
        ("- 1\n", "holds no settings"),
        ("kind: text\nbase: nowhere.yaml\n", "nowhere.yaml cannot be read: No such file"),
        ("kind: games\n", r"sweep.yaml: kind is 'games'"),
    ],
)
def test_files_that_are_no_sweeps_are_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_sweep(file)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists(), "nothing in a file is run"


def begun(tmp_path, summary=None, **run):
    """A run of a sweep with a folder, as a process would have left it."""
    base = {"run": {"iterations": 3} | run}
    (first, *_) = asked(dir=str(tmp_path), base=base)
    first.folder.mkdir(parents=True)
    (first.folder / "config.yaml").write_text(yaml.safe_dump(plain(first.config)))
    if summary:
        (first.folder / "summary.json").write_text(json.dumps({"seconds": 1.0} | summary))
    return first


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        (None, "to resume"),
        ({"iterations": 3, "stopped_by": "iterations"}, "finished"),
        ({"iterations": 2, "stopped_by": "stop.reward"}, "finished"),
        ({"iterations": 2, "stopped_by": "iterations"}, "finished"),  # with fewer iterations than the sweep now has
        ({"iterations": 2, "stopped_by": "interrupt"}, "to resume"),
        ({"iterations": 2, "stopped_by": "an error"}, "to resume"),
        ({"iterations": 0, "stopped_by": "an error"}, "to begin"),
        ({"iterations": 3, "stopped_by": "SIGTERM"}, "finished"),  # in its last iteration
        ({"iterations": 3, "stopped_by": "numbers that are not finite"}, "to begin"),  # it learned nothing
        ({"iterations": 2, "stopped_by": "numbers that are not finite"}, "to resume"),
    ],
)
def test_how_far_a_run_is(summary, state, tmp_path):
    assert begun(tmp_path, summary).state() == state


@pytest.mark.parametrize(
    ("summary", "message"), [({"iterations": "3"}, "iterations is not a count"), ({"seconds": None}, "seconds is not")]
)
def test_a_damaged_summary_is_named(summary, message, tmp_path):
    run = begun(tmp_path, {"iterations": 3, "stopped_by": "iterations"} | summary)
    with pytest.raises(ConfigError, match=rf"summary\.json: {message}"):
        run.state()


@pytest.mark.parametrize(("iterations", "state"), [(2, "to resume"), (3, "finished")])
def test_epochs_are_done_once_their_rows_are_read_whatever_stopped_the_run(iterations, state, tmp_path):
    base = {"data.dataset": "rows.jsonl", "data.epochs": 2, "data.batch_size": 8, "run.save_every": 1}
    (run,) = expand({"kind": "sft", "dir": str(tmp_path), "seeds": [1], "base": base} | ONE)
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").touch()
    (run.folder / "parts.json").write_text(json.dumps({"data.dataset": {"digest": "", "rows": 12}}))
    summary = {"iterations": iterations, "stopped_by": "interrupt", "seconds": 1.0}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    assert run.state() == state


def test_a_run_without_checkpoints_is_to_begin_anew(tmp_path):
    run = begun(tmp_path, save_every=0)
    assert run.state() == "to begin"
    (run.folder / "checkpoints" / "000002").mkdir(parents=True)  # it was asked to stop
    assert run.state() == "to resume"


def test_a_run_that_was_begun_with_other_settings_is_named(tmp_path):
    run = begun(tmp_path)
    refuse_changed([run])
    run.config.optim.lr = 0.5
    with pytest.raises(ConfigError, match=r"plain/seed-1 in .* was begun with other settings: optim.lr is 0.5 and was"):
        refuse_changed([run])


def test_a_run_that_ended_is_never_begun_anew(tmp_path):
    """Without checkpoints, and with fewer iterations than the sweep now has."""
    run = begun(tmp_path, {"iterations": 3, "stopped_by": "iterations"}, save_every=0)
    run.config.run.iterations = 4
    assert start(run, {}) is None
    assert (run.folder / "summary.json").is_file()
    with pytest.raises(
        ConfigError, match=r"other settings: run\.iterations is 4 and was 3; give the sweep another dir"
    ):
        refuse_changed([run])


def test_a_run_whose_reward_file_was_edited_is_named(tmp_path):
    source = tmp_path / "rewards.py"
    source.write_text("def length(completions):\n    return [len(x) for x in completions]\n")
    text = {"kind": "text", "dir": str(tmp_path / "runs"), "seeds": [1]} | ONE
    (run,) = expand(text | {"base": {"reward": [{"function": f"{source}:length"}]}})
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(plain(run.config)))
    part = part_of(f"{source}:length")
    (run.folder / "parts.json").write_text(json.dumps({"reward[0].function": part}))
    refuse_changed([run])
    source.write_text("def length(completions):\n    return [-len(x) for x in completions]\n")
    with pytest.raises(ConfigError, match=r"other settings: reward\[0\]\.function is now length \(rewards\.py"):
        refuse_changed([run])
    # A run that failed in its first iteration begins anew, so the mended file is taken.
    summary = {"iterations": 0, "stopped_by": "a reward", "seconds": 1.0}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    refuse_changed([run])


@pytest.mark.parametrize("template", [None, "Q: {{ prompt }}"])
def test_a_run_of_texts_whose_data_were_edited_is_named(template, tmp_path):
    data, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.json"
    data.write_text('{"prompt": "one", "answer": 1}\n')
    held_out.write_text('[{"prompt": "two"}]')
    base = {"prompts.dataset": str(data), "prompts.template": template, "eval.dataset": str(held_out), "eval.every": 1}
    (run,) = expand({"kind": "text", "dir": str(tmp_path / "runs"), "seeds": [1], "base": base} | ONE)
    tokenizer = load_tokenizer(run.config.model)
    prompts = load_prompts(run.config.prompts, tokenizer, seed=1, limit=None)
    apart = load_prompts(run.config.held_out_prompts(), tokenizer, seed=1, limit=None, group="eval")
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(plain(run.config)))
    parts = parts_of(run.config, {}, prompts, apart, {"model": "", "tokenizer": ""})
    (run.folder / "parts.json").write_text(json.dumps(parts))
    refuse_changed([run])
    for key, file in (("eval", held_out), ("prompts", data)):
        file.write_text('{"prompt": "three", "answer": 1}\n')
        with pytest.raises(ConfigError, match=rf"other settings: {key}\.dataset is now 1 row of prompt, answer \("):
            refuse_changed([run])
        held_out.unlink(missing_ok=True)  # as data of the hub, it is not compared


@pytest.mark.parametrize("kind", ["sft", "reward-model", "dpo"])
def test_a_run_on_a_data_set_that_was_edited_or_from_another_model_is_named(kind, tmp_path):
    data, model = tmp_path / "rows.jsonl", shutil.copytree(resolve("builtin:reviews"), tmp_path / "model")
    row = {"prompt": "This movie", "rejected": " is bad", "chosen": " is good", "completion": " is good"}
    data.write_text(json.dumps(row))
    base = {"data.dataset": str(data), "model.name": str(model)}
    (run,) = expand({"kind": kind, "dir": str(tmp_path / "runs"), "seeds": [1], "base": base} | ONE)
    *_, parts = load_examples(run.config, load_model(run.config), None, None)
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(plain(run.config)))
    (run.folder / "parts.json").write_text(json.dumps(parts | {"model.name": part_of(str(model))}))
    refuse_changed([run])
    data.write_text(json.dumps(row | {"prompt": "A movie"}))
    with pytest.raises(ConfigError, match=r"other settings: data\.dataset is now 1 row of prompt, "):
        refuse_changed([run])
    data.write_text(json.dumps(row))
    with (model / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ConfigError, match=r"other settings: model\.name is now "):
        refuse_changed([run])
    shutil.rmtree(model)  # as where a sweep that is finished is compared once more
    refuse_changed([run])


def test_a_run_whose_environment_was_edited_is_named(tmp_path, monkeypatch):
    (tmp_path / "ponds.py").write_text("import gymnasium as gym\n\n\nclass Pond(gym.Env):\n    depth = 1\n")
    with (tmp_path / "ponds.py").open("a") as file:
        file.write("\n\ngym.register('Pond-v0', Pond)\n")
    monkeypatch.chdir(tmp_path)
    sweep = {"kind": "control", "dir": "runs", "seeds": [1], "base": {"env.id": "ponds:Pond-v0"}} | ONE
    (run,) = expand(sweep)
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(plain(run.config)))
    part = describe(registered_code("ponds:Pond-v0"))
    (run.folder / "parts.json").write_text(json.dumps({"env.id": part}))
    refuse_changed([run])
    (run.folder / "parts.json").write_text(json.dumps({"env.id": part | {"digest": "another"}}))
    with pytest.raises(ConfigError, match=r"other settings: env\.id is now Pond \(ponds\.py"):
        refuse_changed([run])


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "text",
            {"advantage.estimator": "{file}:gaee"},
            r"variant plain: advantage\.estimator: .* has no 'gaee'",
        ),
        ("text", {"critic.kind": "{file}:gae"}, r"variant plain: critic\.kind gae \(mine\.py\) has no method values"),
        (
            "text",
            {"reward": [{"function": "{broken}:f"}]},
            r"reward\[0\]: the reward file .* raised Zero.* at .*:2$",
        ),
        ("text", {"env.factory": "{file}:Game"}, r"env\.factory .*mine\.py:Game: .* has no 'Game'"),
        (
            "control",
            {"ppo.loss": "{file}:gae"},
            r"variant plain: ppo\.loss gae .* needs rewards, which this run",
        ),
    ],
)
def test_code_that_cannot_be_used_is_found_before_the_first_run(kind, settings, message, tmp_path):
    files = {"file": tmp_path / "mine.py", "broken": tmp_path / "broken.py"}
    files["file"].write_text("def gae(rewards, values):\n    return rewards, values\n")
    files["broken"].write_text("f = 1\nf / 0\n")
    base = yaml.safe_load(re.sub(r"\{(file|broken)\}", lambda found: str(files[found[1]]), json.dumps(settings)))
    runs = asked(kind=kind, base=base)
    with pytest.raises(ConfigError, match=message):
        refuse_broken(runs)


def test_what_a_run_chose_for_itself_is_no_other_setting(tmp_path):
    text = {"kind": "text", "dir": str(tmp_path), "seeds": [1]} | ONE
    (run,) = expand(text)
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(plain(run.config)))
    (run.folder / "choices.json").write_text('{"model.dtype": "bfloat16"}')
    refuse_changed([run])
    (run,) = expand(text | {"base": {"model.dtype": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"other settings: model\.dtype is 'bfloat16' and was 'auto'"):
        refuse_changed([run])
