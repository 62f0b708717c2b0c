"""Arguments of `PPOTrainer` of a wrong kind are refused before anything is loaded; the lines before a run."""

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import GPT2Config

import tokencredit as tc
from helpers.configs import text_config
from tokencredit.errors import ConfigError
from tokencredit.settings.data import TEXTS, RewardTerm
from tokencredit.settings.fields import refuse_unused
from tokencredit.text.models.run_models import load_start
from tokencredit.text.ppo_setup import check_batch_size, environments_of, prepare_rows, source
from tokencredit.text.rewards.texts import last_message

ROWS = [{"prompt": "A film"}]


class Reward:
    def __call__(self, completions):
        return [0.0 for _ in completions]


def config(settings=None):
    """A configuration whose model is not there, so that a test shows that nothing was loaded before."""
    return tc.PPOConfig.from_dict({"model.name": "./nowhere"} | (settings or {}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": tc.ModelConfig()}, r"^model is ModelConfig\(.*; it must be a str, a hub id or folder, or a loaded"),
        (
            {"model": torch.nn.Linear(1, 1)},
            r"^model is a Linear, a module without a Transformers configuration; give",
        ),
        ({"args": {"kl.coef": 0.1}}, r"^args is a dict; give a PPOConfig, such as PPOConfig\.from_dict"),
        ({"processing_class": "gpt2"}, r"^processing_class is 'gpt2'; it must be a Transformers tokenizer"),
        (
            {"peft_config": tc.LoraConfig(rank=4)},
            r"^peft_config is LoraConfig\(rank=4.*; it must be .* as model\.lora$",
        ),
        ({"train_dataset": "prompts.jsonl"}, r"^train_dataset is of type str; it must be a datasets\.Dataset"),
        (
            {"eval_dataset": {"prompt": ["A"]}, "args": config({"eval.every": 1})},
            r"^eval_dataset is of type dict; it must be",
        ),
        ({"eval_dataset": ROWS}, r"^eval_dataset is given, which has no effect without eval\.every; leave it out$"),
        (
            {"train_dataset": ROWS, "args": config({"prompts.text": "A"})},
            r"^train_dataset and prompts\.text are both given; leave one of them out$",
        ),
        (
            {"eval_dataset": ROWS, "args": config({"eval.every": 1, "eval.text": "A"})},
            r"^eval_dataset and eval\.text are both given",
        ),
        (
            {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM"), "args": config({"model.lora.rank": 4})},
            r"^peft_config and model\.lora\.rank are both given; leave one of them out$",
        ),
        (
            {"args": config({"prompts.column": "q"})},
            r"^prompts\.column is 'q', which has no effect without prompts\.dataset",
        ),
        ({"reward_funcs": Reward}, r"^reward_funcs\[0\]: Reward is a class; pass an instance, Reward\(…\)$"),
        (
            {"reward_funcs": tc.Term("a", "1", Reward())},
            r"^reward_funcs\[0\]: weight is '1'; it must be a finite number$",
        ),
        (
            {"reward_funcs": [Reward(), tc.Term("a", 1, Reward(), timeout=0)]},
            r"^reward_funcs\[1\]: timeout is 0; it must be a number above 0, or None$",
        ),
        (
            {"ref_model": "gpt2", "reward_model": "m"},
            r"^ref_model is TRL's, and has no counterpart here \(the reference is .*\); reward_model is TRL's name for "
            r"reward, PPOTrainer\(reward_funcs\) \(docs page .Coming from TRL.\)$",
        ),
        ({"reward_fns": []}, r"^PPOTrainer takes no argument reward_fns; did you mean reward_funcs\?$"),
        (
            {"zzz": 1, "beta": 0.1},
            r"^beta is TRL's name for kl\.coef \(docs page .Coming from TRL.\); PPOTrainer takes no "
            r"argument zzz; it takes model, reward_funcs, .*, environment_factory; settings go into args$",
        ),
    ],
)
def test_an_argument_of_a_wrong_kind_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tc.PPOTrainer(**({"args": config()} | arguments))
    assert "\n" not in str(caught.value)


def test_a_column_that_the_evaluation_lacks_is_one_of_its_data_set():
    with pytest.raises(ConfigError, match=r"needs answer; .* from the columns of eval\.dataset \(eval_dataset in Pyt"):
        tc.PPOTrainer(
            args=tc.PPOConfig.from_dict({"eval.every": 1}),
            reward_funcs=lambda completions, answer: [1.0 for _ in completions],
            train_dataset=[{"prompt": "A film", "answer": "is"}],
            eval_dataset=ROWS,
        )


def test_what_is_set_on_the_configuration_is_checked_again():
    args = config()
    args.optim.lr = "1e-3"
    with pytest.raises(ConfigError, match=r"^optim\.lr is '1e-3'; it must be a number$"):
        tc.PPOTrainer(args=args)
    args = tc.ControlConfig()
    args.optim.lr = "1e-3"
    with pytest.raises(ConfigError, match=r"^optim\.lr is '1e-3'; it must be a number$"):
        tc.ControlTrainer(args)


def test_a_checkpoint_is_not_named_by_its_folder(tmp_path):
    trainer = tc.ControlTrainer(tc.ControlConfig.from_dict({"run.dir": str(tmp_path / "run")}))
    with pytest.raises(
        ConfigError, match=r"^resume_from_checkpoint is 'runs/a'; it must be true or false, for the run in"
    ):
        trainer.train(resume_from_checkpoint="runs/a")
    assert not (tmp_path / "run").exists()


def test_settings_of_columns_are_read_beside_rows_from_python():
    args = config({"prompts.column": "question"})
    with pytest.raises(ConfigError, match="nowhere"):  # further than the arguments
        tc.PPOTrainer(reward_funcs=Reward(), args=args, train_dataset=[{"question": "A film"}])


@pytest.mark.parametrize("factory", [None, "builtin:grid"])
@pytest.mark.parametrize("text", ["A film", None])
def test_held_out_data_may_have_another_column_than_prompt(text, factory, tokenizer, tmp_path):
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"question": "Was it good?"}\n')
    settings = {"prompts.text": text, "prompts.column": "question", "eval.dataset": str(file), "env.factory": factory}
    args = tc.PPOConfig.from_dict(settings)
    refuse_unused(args, rows=())
    lm = SimpleNamespace(config=GPT2Config())
    rows, held_out = prepare_rows(args, lm, tokenizer, environments_of(args), None, None)
    if factory is None:
        assert (rows.batch(0, 1).texts, held_out.batch(0, 1).texts) == ([text or TEXTS[0]], ["Was it good?"])
    else:
        assert (rows.batch(0, 1).rows, held_out.batch(0, 1).rows) == (
            [{"prompt": text}] if text else [{}],
            [{"prompt": "Was it good?"}],
        )


def test_an_order_of_no_rows_is_refused(tokenizer):
    args = tc.PPOConfig.from_dict({"env.factory": "builtin:grid", "prompts.shuffle": True})
    lm = SimpleNamespace(config=GPT2Config())
    with pytest.raises(
        ConfigError, match=r"^prompts\.shuffle is true, and there are no rows to shuffle; leave it out$"
    ):
        prepare_rows(args, lm, tokenizer, environments_of(args), None, None)


def test_a_column_that_the_prompts_lack_is_refused_before_the_folder_is_made(tmp_path):
    """It was refused at the first batch, and the folder then blocked the corrected run."""

    def correct(completions, answer):
        return [float(completion == answer) for completion in completions]

    rows, args = [{"prompt": "This movie was really"}], text_config(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"^the reward 'correct' needs answer; .* columns of prompts\.dataset \(train_"
    ):
        tc.PPOTrainer(reward_funcs=correct, args=args, train_dataset=rows)
    fluency = tc.PPOConfig.from_dict({"reward": [{"function": "reference_fluency"}], "kl.coef": 0.0})
    with pytest.raises(ConfigError, match=r"needs ref_logprobs, .* set kl\.coef above 0"):
        tc.PPOTrainer(args=replace(args, reward=fluency.reward, kl=fluency.kl))
    assert not (tmp_path / "run").exists()
    rows[0]["answer"] = " bad"
    tc.PPOTrainer(reward_funcs=correct, args=args, train_dataset=rows).train()


def test_every_process_has_a_prompt_to_sample_and_to_evaluate():
    args = tc.PPOConfig.from_dict(
        {"rollout.batch_size": 8, "rollout.per_prompt": 2, "ppo.minibatches": 8, "eval.every": 1, "eval.samples": 3}
    )
    check_batch_size(args, 3)
    with pytest.raises(ConfigError) as caught:
        check_batch_size(args, 5)
    assert str(caught.value).startswith("rollout.batch_size is 8; it must be at least 10, 5 processes")
    with pytest.raises(ConfigError, match=r"eval\.samples is 3; it must be at least 4, one per process"):
        check_batch_size(args, 4)


CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
QUESTIONS = ["How was the film?", "And the plot?", "Who acted " + "so very " * 20 + "well?"]


def summarized(folder, **settings):
    base = {"model.dtype": "float32", "rollout.batch_size": 4, "rollout.max_new_tokens": 4, "ppo.minibatches": 1}
    base |= {"run.dir": str(folder), "run.iterations": 1, "run.trackers": [], "run.show_every": 1}
    return tc.PPOConfig.from_dict(base | settings)


def lines(trainer):
    return list(trainer.overview())


def test_the_defaults_in_a_few_lines(tmp_path):
    policy = tc.PPOTrainer(args=summarized(tmp_path / "run"))
    size = sum(p.numel() for p in policy.policy.lm.parameters()) / 1e6
    # By hand: prefixes with half a completion on average, beside the policy's passes over whole texts.
    reader = policy.pipeline.terms[0].function.model
    read = sum(p.numel() for p in reader.parameters()) - reader.get_input_embeddings().weight.numel()
    prompt, passes = float(policy.prompts.batch(0, 1).mask.sum()), 2 + 3 * policy.args.ppo.epochs
    cost = f" ({4 * (prompt + 2) * read / ((prompt + 4) * size * 1e6 * passes):.2g} of the policy's passes)"
    assert lines(policy) == [
        ("model", f"builtin:reviews, {size:.3g} million parameters"),
        ("prompts", "1: This movie was really"),
        ("reward", "P(NEGATIVE) of builtin:reviews"),
        ("values", f"returns fitted to the reward's score of each prefix{cost}, and the critic for the rest"),
        ("device", f"{policy.processes.device}, float32"),
        ("run", f"{tmp_path / 'run'}, 1 iterations of 4 completions"),
    ]


def test_the_card_has_a_last_evaluation_of_0(tmp_path):
    def zero(completions, **columns):
        return [0.0 for _ in completions]

    tc.PPOTrainer(args=summarized(tmp_path / "run", **{"eval.every": 1, "eval.samples": 4}), reward_funcs=zero).train()
    assert "| eval/reward | 0 |" in (tmp_path / "run" / "policy" / "README.md").read_text()


def test_an_adapter_prompts_of_a_file_and_several_terms(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    terms = [{"classifier": "builtin:reviews", "output": "logit"}, {"function": "repetition", "weight": -0.5}]
    settings = {"model.lora.rank": 2, "prompts.dataset": str(file), "prompts.shuffle": False, "reward": terms}
    trainer = tc.PPOTrainer(args=summarized(tmp_path / "run", **settings))
    told = lines(trainer)
    trained = sum(p.numel() for p in trainer.policy.lm.parameters() if p.requires_grad)
    assert told[0][1].endswith(f"million parameters, {trained:,} trained")
    assert told[1] == ("prompts", f"3 of {str(file)!r}; the first: How was the film?")
    assert told[2:4] == [("reward", "logit of NEGATIVE of builtin:reviews"), ("reward", "-0.5 × repetition")]


def test_terms_from_python_have_their_names(tmp_path):
    def brief(completions, **columns):
        return [-float(len(text)) for text in completions]

    trainer = tc.PPOTrainer(args=summarized(tmp_path / "run"), reward_funcs=[brief, tc.Term("rhymes", 2.0, brief)])
    assert [text for label, text in lines(trainer) if label == "reward"] == ["brief", "2 × rhymes"]
    told = dict(lines(trainer))["values"]
    assert told.startswith("the critic's alone;")
    assert "prefix: true, for a cheap function" in told
    learned = tc.PPOTrainer(args=summarized(tmp_path / "learned", **{"critic.prefix_every": 0}))
    assert dict(lines(learned))["values"].endswith("may make them truer (critic.prefix_every: 1)")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"classifier": "a/b", "label": "GOOD"}, "P(GOOD) of a/b"),
        ({"classifier": "a/b", "label": "GOOD", "output": "log_odds"}, "log-odds of GOOD of a/b"),
        ({"function": "rewards.py:brief"}, "rewards.py:brief"),
        ({"reward_model": "a/c"}, "reward model a/c"),
    ],
)
def test_the_source_of_each_kind_of_term(settings, text):
    assert source(RewardTerm.read(settings)) == text


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("A film", "A film"),
        ([{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two"}], "One"),
        ([{"role": "user", "content": [{"type": "text", "text": "One"}]}], "One"),
        ([{"role": "system", "content": "Be brief."}], "Be brief."),
    ],
)
def test_the_last_message(prompt, shown):
    assert last_message(prompt) == shown


def test_a_conversation_is_recorded_and_shown_by_its_last_user_message(tmp_path, tokenizer, capsys):
    chatty = deepcopy(tokenizer)
    chatty.chat_template = CHAT
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    args = summarized(tmp_path / "run", **{"prompts.shuffle": False})
    tc.PPOTrainer(args=args, processing_class=chatty, train_dataset=rows).train()
    out = capsys.readouterr().out
    assert "prompts  3 of train_dataset; the first: How was the film?" in out.splitlines()
    assert "[user]" not in out
    assert "user › How was the film?" in out
    kept = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    said = [[{"role": "user", "content": question}] for question in (*QUESTIONS, QUESTIONS[0])]
    assert [sample["messages"] for sample in kept] == said
    assert kept[0]["prompt"] == "[user] How was the film?\n[assistant]"
    assert tc.read_run(tmp_path / "run").samples[0]["messages"] == said[0]
    assert f"tokencredit generate {tmp_path / 'run'}" in out
    assert "tokencredit audit" not in out, "which would not find the rows from Python"


@pytest.mark.parametrize(("template", "said"), [(None, False), ("{{ messages[0]['content'] }}", True)])
def test_plain_prompts_say_that_a_chat_template_is_not_used(template, said, tmp_path):
    model, tokenizer = load_start(tc.ModelConfig())
    tokenizer.chat_template = template
    trainer = tc.PPOTrainer(model=model, processing_class=tokenizer, args=text_config(tmp_path / "run"))
    assert any("chat template is not used" in note for note in trainer.notes) == said
