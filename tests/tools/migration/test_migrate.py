"""`tokencredit migrate`: each form of the peers' configurations becomes a run.yaml that loads, and nothing is lost."""

import ast
import json
import textwrap
from shutil import copytree

import pytest

from tokencredit.cli import main
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.model_loading import resolve
from tokencredit.tools.migration.arithmetic import names_in_scope, shell_sum
from tokencredit.tools.migration.shell import Script

TRL_YAML = """
model_name_or_path: org/policy
reward_model_path: org/reward
dataset_name: prompts.jsonl
output_dir: runs/first
learning_rate: 1.0e-5
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
total_episodes: 2560
warmup_ratio: 0.1
bf16: true
load_best_model_at_end: true
an_argument_of_mine: 3
"""
TRL_PYTHON = """
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
raise SystemExit("this file is never run")
name = "org/policy"
config = PPOConfig(
    model_name=name, batch_size=64, mini_batch_size=16, adap_kl_ctrl=False, log_with="wandb", seed=len(name)
)
data = load_dataset("json", data_files="prompts.jsonl")
peft = LoraConfig(r=8, lora_alpha=16)
"""
LLAMA_FACTORY = """
stage: ppo
model_name_or_path: org/policy
reward_model: org/reward
dataset: prompts.jsonl
finetuning_type: lora
lora_rank: 4
template: qwen
ppo_target: 8.0
top_k: 0
top_p: 1.0
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
num_train_epochs: 2.0
bf16: true
"""
SWIFT = r"""
nproc=4
NPROC_PER_NODE=$nproc \
swift rlhf --rlhf_type ppo --model org/policy --reward_model org/reward --dataset 'prompts.jsonl#500' \
    --tuner_type full --response_length 128 --gradient_accumulation_steps $(expr 16 / $nproc) --num_train_epochs 1 \
    --deepspeed zero3
"""
VERL = r"""
set -x
MODEL=${MODEL:-org/policy}
DATA=(
    data.train_files=$HOME/data/train.parquet
    data.train_batch_size=$((4 * 64))
)
python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    algorithm.adv_estimator=gae \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.n=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.fsdp_config.param_offload=True \
    +actor_rollout_ref.actor.use_kl_loss=True \
    critic.model.path="$MODEL" \
    reward_model.enable=True \
    reward_model.model.path=org/reward \
    reward_model.rollout.name=sglang \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=$NAME \
    trainer.total_epochs=3 $@
"""
VERL_YAML = """
actor_rollout_ref:
  model: {path: org/policy}
  actor: {ppo_epochs: 2, clip_ratio_low: 0.1, use_fused_kernels: "${oc.select:x,false}"}
data: {train_files: prompts.parquet, train_batch_size: 128}
trainer: {total_training_steps: 30}
"""
OPENRLHF = r"""
srun bash -c "pip install ray && ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path org/policy --reward.model_name_or_path org/reward \
   --data.prompt_dataset prompts.jsonl --rollout.batch_size 256 --rollout.n_samples_per_prompt 2 \
   --train.batch_size 64 --rollout.max_new_tokens 64 --actor.adam.lr 5e-7 --ds.zero_stage 3 --reward.normalize_enable \
   --algo.kl.init_coef 0.02" &>> log
"""
OLD_OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/policy --init_kl_coef 0.02 --vllm_num_engines 2"

CASES = {
    "trl.yaml": (TRL_YAML, {"optim.lr": 1e-5, "critic.lr": 1e-5, "rollout.batch_size": 64, "run.iterations": 40}),
    "trl.py": (TRL_PYTHON, {"model.name": "org/policy", "ppo.minibatches": 4, "kl.target": None, "model.lora.rank": 8}),
    "llama.yaml": (
        LLAMA_FACTORY,
        {"model.lora.alpha": 8.0, "kl.target": 8.0, "ppo.micro_batch_tokens": None, "run.iterations": 63}
        | {
            "prompts.role": "user",
            "prompts.template": "{{ [instruction, input | default('')] | select | join('\\n') }}",
        },
    ),
    "swift.sh": (SWIFT, {"rollout.batch_size": 16, "rollout.max_new_tokens": 128, "rollout.stop_at_eos": True}),
    "verl.sh": (VERL, {"rollout.batch_size": 512, "ppo.minibatches": 4, "kl.place": "loss", "kl.estimator": "k3"}),
    "verl.yaml": (VERL_YAML, {"ppo.epochs": 2, "ppo.clip": 0.1, "critic.clip": 0.5, "run.iterations": 30}),
    "openrlhf.sh": (OPENRLHF, {"rollout.batch_size": 512, "ppo.minibatches": 8, "score.normalize": "none"}),
    "old.sh": (OLD_OPENRLHF, {"model.name": "org/policy", "kl.coef": 0.02, "rollout.engine": "vllm"}),
}
COUNT_NO_EPOCHS = ("trl.yaml", "trl.py", "verl.yaml")


def run(folder, name, text, capsys, *options):
    """The configuration, the file's text and what is said on the terminal."""
    (folder / name).write_text(text, encoding="utf-8")
    out = folder / f"{name}.run.yaml"
    assert main(["migrate", str(folder / name), "--out", str(out), *options]) == 0
    return PPOConfig.from_yaml(out), out.read_text(encoding="utf-8"), capsys.readouterr().err


@pytest.mark.parametrize("name", CASES)
def test_each_form_becomes_a_configuration_that_loads(name, tmp_path, capsys):
    text, expected = CASES[name]
    config, _, told = run(tmp_path, name, text, capsys, *["--rows", "500"] * (name not in COUNT_NO_EPOCHS))
    assert len(set(told.splitlines())) == len(told.splitlines()), "a note is said twice"
    for key, value in expected.items():
        found = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


@pytest.mark.parametrize("name", COUNT_NO_EPOCHS)
def test_a_number_of_prompts_that_no_epochs_need_is_refused(name, tmp_path, capsys):
    (tmp_path / name).write_text(CASES[name][0])
    assert main(["migrate", str(tmp_path / name), "--rows", "500"]) == 2
    told = capsys.readouterr()
    assert "--rows is 500" in told.err
    assert "counts no epochs, so it has no effect; leave it out" in told.err
    assert not told.out


def test_a_value_names_its_origin_and_what_is_left_is_said(tmp_path, capsys):
    _, text, told = run(tmp_path, "trl.yaml", TRL_YAML, capsys)
    assert "  lr: 1.0e-05  # learning_rate\n" in text
    assert "  warmup: 4  # warmup_steps 0 (default), warmup_ratio 0.1, lr_scheduler_type linear (default)\n" in text
    assert "  temperature: 0.7  # default of TRL: temperature\n" in text
    assert "#   load_best_model_at_end: with eval.every the policy with the best mean score is in best/" in text
    assert "#   an_argument_of_mine: not known" in text
    assert "without counterpart, with reasons in the file: load_best_model_at_end, an_argument_of_mine" in told


def test_misspelt_names_are_answered_and_keys_of_others_services_are_not_written(tmp_path, capsys):
    lines = "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --train.batch_sise 4 --use_wandb s3cr3t"
    for said in run(tmp_path, "a.sh", lines, capsys)[1:]:
        assert "train.batch_sise is not known; did you mean train.batch_size?" in said
        assert "s3cr3t" not in said
    assert (
        "learning_rat: not known; did you mean learning_rate?"
        in run(tmp_path, "b.yaml", TRL_YAML.replace("learning_rate", "learning_rat"), capsys)[1]
    )


def test_a_value_that_names_another_is_that_value(tmp_path, capsys):
    text = VERL_YAML.replace("30}", '30, experiment_name: first, default_local_dir: "out/${trainer.experiment_name}"}')
    assert run(tmp_path, "a.yaml", text, capsys)[0].run.dir == "out/first"


def test_a_script_of_python_is_read_and_not_run(tmp_path, capsys):
    config, _, told = run(tmp_path, "trl.py", TRL_PYTHON, capsys)
    assert (config.prompts.dataset, config.run.trackers, config.critic.kind) == ("prompts.jsonl", ["wandb"], "shared")
    assert "not read: seed=len(name) is computed by the script" in told
    assert "left to you: reward: no reward is named" in told
    assert config.reward[0].function == "REWARD.py:reward", "which no run takes: the default is another reward"


def test_a_value_model_of_a_script_is_the_critic(tmp_path, capsys):
    load = "AutoModelForSequenceClassification.from_pretrained"
    text = f'reward_model = {load}("org/reward")\nvalue_model = {load}("org/policy", num_labels=1)\n'
    inline = f'PPOTrainer(value_model={load}("org/policy", num_labels=1), reward_model={load}("org/reward"))\n'
    for name, models in {"trl.py": text, "inline.py": inline}.items():
        config, _, _ = run(tmp_path, name, models + "PPOConfig(kl_coef=0.05, response_length=53)", capsys)
        assert (config.reward[0].reward_model, config.critic.name) == ("org/reward", "org/policy")


LOAD = "AutoModelForSequenceClassification.from_pretrained"


def test_a_value_model_of_another_tokenizer_is_no_critic(tmp_path, capsys):
    """Which training would refuse; the policy's own tokenizer is taken."""
    policy, judge = resolve("builtin:reviews"), resolve("builtin:reviews", "sentiment")
    for folder, taken in ((judge, None), (copytree(policy, tmp_path / "value"), str(tmp_path / "value"))):
        models = f'AutoModelForCausalLM.from_pretrained("{policy}")\nvalue_model = {LOAD}("{folder}", num_labels=1)\n'
        config, text, told = run(tmp_path, f"{taken is None}.py", f"{models}PPOConfig(kl_coef=0.05)", capsys)
        assert (config.critic.kind, config.critic.name) == ("separate", taken)
        left = f"critic.name: no value model is taken over from {folder}, whose tokenizer has other ids for 2047 of"
        for lines in (text, told):
            assert (left in lines) == ("the critic begins as a copy of the policy" in lines) == (taken is None)


@pytest.mark.parametrize(
    ("config", "labels", "term", "said"),
    [
        ({"id2label": {"0": "BAD", "1": "GOOD"}}, "", ("classifier", "GOOD"), "the last of BAD, GOOD is written"),
        ({"architectures": ["XForSequenceClassification"]}, "", ("classifier", "LABEL_1"), "the last of LABEL_0, LAB"),
        ({"id2label": {"0": "LABEL_0"}}, "", ("reward_model", None), None),
        (None, ", num_labels=2", ("classifier", "LABEL_1"), "the last of LABEL_0, LABEL_1 is written"),
        (None, ", num_labels=1", ("reward_model", None), None),
        (None, "", ("reward_model", None), "no folder here: if --check finds any, name a classifier and label"),
    ],
)
def test_a_reward_model_with_labels_is_a_classifier(config, labels, term, said, tmp_path, capsys):
    folder = tmp_path / "judge"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    text = f'reward = {LOAD}("{folder}"{labels})\nvalue_model = {LOAD}("v", num_labels=1)\nPPOConfig(kl_coef=0.05)'
    found, text, told = run(tmp_path, "trl.py", text, capsys)
    kind, label = term
    assert found.reward[0].source() == (kind, str(folder))
    assert getattr(found.reward[0], "label", None) == label
    assert said is None or (said in text and said in told)
    assert ("reward[0]" in told or "labels of" in told) == (said is not None)


def test_arithmetic_of_a_script_is_computed(tmp_path, capsys):
    script = """
half: int = 4
rows = half * 2
other = load(3)
rate = -(-1e-6) * 3
PPOConfig(total_episodes=rows * 32, learning_rate=rate, per_device_train_batch_size=2 ** 3, response_length=int(1e2),
    num_ppo_epochs=9 ** 9 ** 9, seed=1 / 0, num_mini_batches=other * 2, gradient_accumulation_steps=7 // 2 - 2)
"""
    config, _, told = run(tmp_path, "trl.py", script, capsys)
    assert (config.run.iterations, config.rollout.batch_size, config.rollout.max_new_tokens) == (32, 8, 100)
    assert config.optim.lr == pytest.approx(3e-6)
    for kept in ("num_ppo_epochs=9 ** 9 ** 9", "seed=1 / 0", "num_mini_batches=other * 2"):
        assert f"not read: {kept} is computed by the script" in told
    doubled = "a0 = 1\n" + "".join(f"a{n + 1} = a{n} + a{n}\n" for n in range(90)) + "PPOConfig(seed=a90, gamma=0.9)"
    assert "seed=a90 is computed" in run(tmp_path, "b.py", doubled, capsys)[2], "and ends at once"


def test_a_name_that_a_script_binds_again_is_not_known():
    again = ["n = 3", "if x: n = 3", "n *= 2", "def f():\n global n\n n = 3", "for n in x: pass", "def f(): n[0] = 3"]
    again += ["with x as n: pass", "print(n := 3)", "from x import n", "del n", "n[0] = 3", "n.update(m)"]
    other = ["", "def f(): n = 3", "def f(n): pass", "lambda n: 0", "[0 for n in x]", "class A: n = 3"]
    for line in (*other, *again):
        tree = ast.parse(f"n = 2\nm = 1\n{line}\n")
        assert names_in_scope(tree)[tree.body[0]][1] == ({"m": 1} if line in again else {"n": 2, "m": 1}), line


def test_a_name_is_of_the_scope_in_which_a_call_stands(tmp_path, capsys):
    script = """
class Trainer:
    seed = 5
    def make(self, epochs):
        gamma = 0.7
        return PPOConfig(num_ppo_epochs=epochs, gamma=gamma, seed=seed)
epochs = 3
gamma = 0.6
seed = 7
policy = "org/policy"
def load(policy):
    return AutoModelForSequenceClassification.from_pretrained(policy)
AutoModelForCausalLM.from_pretrained(policy)
"""
    config, _, told = run(tmp_path, "a.py", script, capsys)
    assert (config.model.name, config.seed, config.advantage.gamma, config.ppo.epochs) == ("org/policy", 7, 0.7, 4)
    left = ["reward_model=policy is computed by the script", "num_ppo_epochs=epochs is computed by the script"]
    assert [line.strip() for line in told.splitlines() if "not read" in line] == [f"not read: {x}" for x in left]


def test_dicts_of_arguments_are_read_and_later_changes_are_named(tmp_path, capsys):
    script = """
common = dict(learning_rate=1e-5, num_ppo_epochs=epochs, **more)
inner = {"lam": 0.9}
again = inner
other = {**inner, **again, **other}
config = PPOConfig("out", seed=7, **common, **other, **vars(args))
config.kl_coef = 0.5
self.config.gamma = 0.5
"""
    config, _, told = run(tmp_path, "trl.py", script, capsys)
    assert (config.seed, config.optim.lr, config.advantage.lam, config.kl.coef) == (7, 1e-5, 0.9, 0.05)
    left = ["num_ppo_epochs=epochs is computed by the script", "**more is computed by the script"]
    left += ["**again is computed by the script", "**other is computed by the script"]
    left += ["**vars(args) is computed by the script", "'out', an argument without a name", "config.kl_coef = 0.5"]
    assert [line.strip() for line in told.splitlines() if "not read" in line] == [f"not read: {x}" for x in left]


def test_variables_of_a_shell_are_kept_and_named_if_the_script_does_not_set_them(tmp_path, capsys):
    config, text, told = run(tmp_path, "verl.sh", VERL, capsys)
    assert config.prompts.dataset == "~/data/train.parquet", "which is $HOME everywhere here"
    for lines in (text, told):
        assert "run.dir: the shell sets a part of runs/$NAME; write what it is" in lines
        assert "run.iterations: 3 times through the prompts, 256 per iteration; give migrate their number" in lines
    assert config.rollout.engine == "vllm", "the policy's engine, not the reward model's"


def test_later_files_override_and_kinds_do_not_mix(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(VERL_YAML)
    (tmp_path / "run.sh").write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.ppo_epochs=7")
    (tmp_path / "trl.yaml").write_text(TRL_YAML)
    assert main(["migrate", str(tmp_path / "base.yaml"), str(tmp_path / "run.sh")]) == 0
    assert "  epochs: 7  # actor_rollout_ref.actor.ppo_epochs\n" in capsys.readouterr().out
    assert main(["migrate", str(tmp_path / "base.yaml"), str(tmp_path / "trl.yaml")]) == 2
    assert "of several projects, verl, TRL; migrate one at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "stage: sft\n", "stage is sft; migrate reads stage: ppo"),
        ("a b.yaml", "model: {name: x}\nrun: {iterations: 3}\n", "tokencredit already; tokencredit train --config '/"),
        ("a.yaml", "colour: red\n", "of no project that is known"),
        ("a.yaml", "num_generations: 8\nbeta: 0.0\n", "num_generations is of TRL's GRPOConfig, and migrate reads PPO"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(beta=0.1))\n", "GRPOConfig is not read; migrate reads PPOConfig"),
        ("a.sh", "echo hello\n", "no settings of PPO were found"),
        (
            "a.py",
            "from stable_baselines3 import PPO\nPPO('MlpPolicy', env)\n",
            "its arguments as flags of tokencredit contr",
        ),
        ("a.py", "print('x'", "is not Python that can be read"),
        ("a.sh", "swift rlhf --rlhf_type dpo --model x\n", "its command trains with dpo; migrate reads ppo"),
    ],
)
def test_a_file_of_another_kind_is_refused(name, text, message, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["migrate", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_another_project_given_to_train_names_the_command(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(LLAMA_FACTORY)
    assert main(["train", "--config", str(tmp_path / "a.yaml")]) == 2
    assert f"make one of it with: tokencredit migrate {tmp_path / 'a.yaml'}" in capsys.readouterr().err


def test_values_of_other_types_are_left_to_the_user(tmp_path, capsys):
    bad = {"stage": "ppo", "ppo_target": "high", "per_device_train_batch_size": "x", "learning_rate": -1, "top_p": []}
    _, _, told = run(tmp_path, "a.json", json.dumps(bad), capsys)
    for key in ("kl.target", "rollout.batch_size", "optim.lr"):
        assert f"left to you: {key}: " in told
    assert "\x1b" not in run(tmp_path, "b.yaml", 'stage: ppo\n"x\\e[2J": 1\nreward_model: "a\\nb: 1"\n', capsys)[1]


def test_shell_arithmetic_and_quotes():
    text = textwrap.dedent("""
        A=6; B='a b'
        export A=6
        run --x $((A * 7)) --y "$B" --z $(date) --w ${C:-$A}
    """)
    *_, words = Script().commands(text)
    assert words == ["run", "--x", "42", "--y", "a b", "--z", "$(date)", "--w", "6"]
    assert [shell_sum(x) for x in ("7 / 0", "x", "9" * 19 + " + 1", "2 + 3 * 4")] == ["", "", "", "14"]
    bomb = "A0=xxxxxxxx\n" + "".join(f"A{n + 1}=$A{n}$A{n}\nB=$((B * 99))\n" for n in range(60)) + "run $A60\n"
    assert len(" ".join(next(Script().commands(bomb)))) < 200_000
    assert len(next(Script().commands(f"A={'x' * 9000}\nrun {'$A' * 9000}"))[1]) == 18_000, "and is not built first"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("A='--x 1'\nA=\"$A --y 2\"\nrun $A; echo", "run|--x|1|--y|2"),
        ("A='--x 1'; A+=' --y 2' && run ${A}", "run|--x|1|--y|2"),
        ('A=$(date +%s); B="--x $A"; run $B "$B" \';\' # it\'s; A=1', "run|--x|$(date +%s)|--x $(date +%s)|;"),
        ('A=(--x 1)\nA=(--y 2)\nA+=(--z 3)\nB=("${A[@]}" --w)\nrun ${B[@]}', "run|--y|2|--z|3|--w"),
        ("if [ $D ]; then\n  A=1; B=1\nelse\n  A=2; B=1\nfi\nrun $A $B", "run|${A}|1"),
        ("A=1\n[ $D ] && A=2\nexport B=3\nrun $A $B", "run|${A}|3"),
        ("A=1; if [ $D ]; then for x in a; do B=1; done; A=2; fi; B=3\nrun $A $B", "run|${A}|3"),
        ("A=1\nB=1\ncase $D in\nx) A=2 ;;\nesac\nf() {\n  B=2\n}\nrun $A $B", "run|${A}|${B}"),
        ("function f {\n  echo\n}\nA=1\nA=2\nrun $A", "run|2"),
        ("HOME=/me\nA=1\nA=2\nrun $A $HOME", "run|2|/me"),
        ("run ${A:-\"b.py\"} --x ${B:-'my model'} ${C:-a b}", "run|b.py|--x|my model|a|b"),
    ],
)
def test_variables_of_a_shell_are_split_replaced_and_continued(lines, words):
    assert next("|".join(found) for found in Script().commands(lines) if found[0] == "run") == words


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python ppo.py", 1),
        ("torchrun --nnodes 2 --nproc-per-node=8 ppo.py", 16),
        ("N=3\ntorchrun --nnodes=1:$N --nproc_per_node=8 ppo.py", None),
        ("G=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node=$G ppo.py", None),
        ("torchrun --nproc_per_node gpu ppo.py", None),
        ("NNODES=2 accelerate launch --num_machines 2 --num_processes 16 ppo.py", 16),
        ("accelerate launch --config_file zero2.yaml ppo.py --deepspeed d.json", None),
        ("NNODES=2 NPROC_PER_NODE=4 swift rlhf --deepspeed zero3", 8),
        ("NPROC_PER_NODE=$G swift rlhf", None),
    ],
)
def test_the_number_of_processes_is_that_of_all_nodes_or_unknown(command, count):
    script = Script()
    *_, words = script.commands(command)
    assert script.processes(" ".join(words)) == count


def test_a_batch_of_a_launcher_without_a_number_is_left_to_the_user(tmp_path, capsys):
    line = "accelerate launch ppo.py --per_device_train_batch_size 16 --total_episodes 320 --num_mini_batches 2"
    config, text, told = run(tmp_path, "a.sh", line, capsys)
    assert (config.rollout.batch_size, config.run.iterations) == (16, 20)
    for lines in (text, told):
        assert "rollout.batch_size: of one process; write it times the number of processes, with run.iter" in lines
        assert "; as since TRL 0.17; before" in lines


def test_arguments_of_llama_factory_override_its_file(tmp_path, capsys):
    (tmp_path / "cfg.yaml").write_text(LLAMA_FACTORY)
    line = "llamafactory-cli train cfg.yaml learning_rate=1e-3 $MORE ppo_epochs=9 --seed 3"
    config, _, told = run(tmp_path, "a.sh", line, capsys, "--rows", "500")
    assert (config.optim.lr, config.ppo.epochs, config.seed, config.kl.target) == (1e-3, 9, 3, 8.0)
    assert "not read: $MORE" in told
    for line in ("$MORE cfg.yaml --seed 3", "--seed 3 cfg.yaml", "--deepspeed z.json --seed=3 cfg.yaml"):
        config, _, told = run(tmp_path, f"{len(line)}.sh", f"llamafactory-cli train {line}", capsys, "--rows", "500")
        assert (config.seed, config.kl.target, "is not there" in told) == (3, 8.0, False), line
    line = "python3 -m verl.trainer.main_ppo ~actor.clip_ratio data.train_batch_size=64 trainer.total_training_steps=5"
    assert "not read: ~actor.clip_ratio" in run(tmp_path, "b.sh", line, capsys)[2]


def test_no_of_yaml_is_no_strategy(tmp_path, capsys):
    config, _, _ = run(tmp_path, "a.yaml", TRL_YAML + "save_strategy: no\nsave_steps: 5\n", capsys)
    assert config.run.save_every == 0
    line = f"{SWIFT.strip()} --val_dataset held.jsonl --eval_strategy no --eval_steps 5"
    assert run(tmp_path, "a.sh", line, capsys, "--rows", "500")[0].eval.every == 0


def test_defaults_without_a_counterpart_are_named(tmp_path, capsys):
    for name, text, default in (
        ("swift.sh", SWIFT, "adam_beta2 0.95"),
        ("openrlhf.sh", OPENRLHF, "actor.adam.betas (0.9, 0.95)"),
    ):
        _, text, told = run(tmp_path, name, text, capsys)
        assert f"#   {default} (default): Adam's are 0.9 and 0.999" in text
        assert f"{default} (default)" in told
    assert "adam_beta2 0.95" not in run(tmp_path, "b.sh", SWIFT.replace("zero3", "zero3 --adam_beta2 0.999"), capsys)[1]


@pytest.mark.parametrize(
    ("name", "text", "keys", "left"),
    [
        (  # its loader leaves out the prompts of an unfinished batch; it evaluates the most likely tokens
            "verl.sh",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=org/policy data.train_batch_size=1000 "
            "trainer.total_epochs=2 trainer.test_freq=5 actor_rollout_ref.actor.use_kl_loss=True "
            "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 data.seed=7",
            {"run.iterations": 10, "eval.temperature": 0.0, "score.overlong": [64.0, 1.0], "seed": 7, "kl.coef": 0.001},
            ["kl.coef: a KL in the loss is divided by the deviation of the advantages here, and not there: give 0.001"],
        ),
        (
            "openrlhf.sh",
            "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/policy --reward_pretrain org/one,org/two "
            "--normalize_reward --eval.dataset held.jsonl --eval.steps 4 --generate_max_len 64 "
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
            {"critic.name": "org/one", "eval.temperature": 0.6, "eval.best_of": 4, "off_policy.correct": "none"},
            ["score.normalize: mean and deviation of the reward", "off_policy.correct: seq-mask-tis masks sequences"],
        ),
        (
            "trl.py",
            "config = PPOConfig(num_mini_batches=2, per_device_train_batch_size=16, total_episodes=3200)",
            {"optim.lr": 3e-6, "rollout.batch_size": 16},
            ["optim.lr: 3e-6 is the default since TRL 0.29", "rollout.batch_size: as since TRL 0.17"],
        ),
        (
            "old.py",
            "config = PPOConfig(model_name='org/policy', ppo_epochs=2, steps=64, batch_size=16)\ntrainer.step(a, b, c)",
            {"rollout.max_new_tokens": 24},
            ["rollout.max_new_tokens: no length of completions is given"],
        ),
    ],
)
def test_values_that_mean_something_else_here_are_left_to_the_user(name, text, keys, left, tmp_path, capsys):
    rows = ["--rows", "5999"] if name == "verl.sh" or name == "openrlhf.sh" else []
    config, _, said = run(tmp_path, name, text, capsys, *rows)
    for key, value in keys.items():
        found = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key
    for line in left:
        assert f"left to you: {line}" in said
