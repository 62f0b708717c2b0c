"""The lines before a run's first iteration, and conversations as a person reads them."""

import json
from copy import deepcopy

import pytest

import tokencredit as tc
from tokencredit.settings.data import RewardTerm
from tokencredit.text.ppo_setup import source
from tokencredit.text.rewards.texts import last_message

CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
QUESTIONS = ["How was the film?", "And the plot?", "Who acted " + "so very " * 20 + "well?"]


def config(folder, **settings):
    base = {"model.dtype": "float32", "rollout.batch_size": 4, "rollout.max_new_tokens": 4, "ppo.minibatches": 1}
    base |= {"run.dir": str(folder), "run.iterations": 1, "run.trackers": [], "run.show_every": 1}
    return tc.PPOConfig.from_dict(base | settings)


def lines(trainer):
    return list(trainer.overview())


def test_the_defaults_in_a_few_lines(tmp_path):
    policy = tc.PPOTrainer(args=config(tmp_path / "run"))
    size = sum(p.numel() for p in policy.policy.lm.parameters()) / 1e6
    assert lines(policy) == [
        ("model", f"builtin:reviews, {size:.3g} million parameters"),
        ("prompts", "1: This movie was really"),
        ("reward", "P(NEGATIVE) of builtin:reviews"),
        ("device", f"{policy.processes.device}, float32"),
        ("run", f"{tmp_path / 'run'}, 1 iterations of 4 completions"),
    ]


def test_an_adapter_prompts_of_a_file_and_several_terms(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    terms = [{"classifier": "builtin:reviews", "output": "logit"}, {"function": "repetition", "weight": -0.5}]
    settings = {"model.lora.rank": 2, "prompts.dataset": str(file), "prompts.shuffle": False, "reward": terms}
    trainer = tc.PPOTrainer(args=config(tmp_path / "run", **settings))
    told = lines(trainer)
    trained = sum(p.numel() for p in trainer.policy.lm.parameters() if p.requires_grad)
    assert told[0][1].endswith(f"million parameters, {trained:,} trained")
    assert told[1] == ("prompts", f"3 of {str(file)!r}; the first: How was the film?")
    assert told[2:4] == [("reward", "logit of NEGATIVE of builtin:reviews"), ("reward", "-0.5 × repetition")]


def test_terms_from_python_have_their_names(tmp_path):
    def brief(completions, **columns):
        return [-float(len(text)) for text in completions]

    trainer = tc.PPOTrainer(args=config(tmp_path / "run"), reward_funcs=[brief, tc.Term("rhymes", 2.0, brief)])
    assert [text for label, text in lines(trainer) if label == "reward"] == ["brief", "2 × rhymes"]


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


@pytest.mark.slow
def test_a_conversation_is_recorded_and_shown_by_its_last_user_message(tmp_path, tokenizer, capsys):
    chatty = deepcopy(tokenizer)
    chatty.chat_template = CHAT
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    args = config(tmp_path / "run", **{"prompts.shuffle": False})
    tc.PPOTrainer(args=args, processing_class=chatty, train_dataset=rows).train()
    out = capsys.readouterr().out
    assert "prompts  3 of train_dataset; the first: How was the film?" in out.splitlines()
    assert "[user]" not in out
    assert "How was the film? → " in out
    kept = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [sample["message"] for sample in kept] == [*QUESTIONS, QUESTIONS[0]]
    assert kept[0]["prompt"] == "[user] How was the film?\n[assistant]"
    assert tc.read_run(tmp_path / "run").samples[0]["message"] == QUESTIONS[0]
    assert f"tokencredit generate {tmp_path / 'run'}" in out
    assert "tokencredit audit" not in out, "which would not find the rows from Python"
