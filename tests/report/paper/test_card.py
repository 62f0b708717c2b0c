"""The model card: what it says of prompts, sampling, KL coefficient and evaluations."""

from tokencredit import PPOConfig
from tokencredit.report.paper.card import model_card

SUMMARY = {"iterations": 2, "stopped_by": "iterations"}


def test_filters_and_an_adapted_coefficient_are_on_the_card():
    adapted = model_card(PPOConfig.from_dict({"kl.target": 6.0}), ["length"], SUMMARY)
    assert "- KL coefficient: 0.05 at first, adapted to 6 nats per sequence, kl.place reward\n" in adapted
    args = PPOConfig.from_dict({"rollout.top_p": 0.7, "rollout.top_k": 50, "eval.every": 1})
    card = model_card(args, ["length"], SUMMARY, evaluation={"eval/reward": 0.5})
    assert "of 64 completions.\n" in card
    assert "- sampling: temperature 1, top_k 50, top_p 0.7, up to 24 tokens\n" in card
    assert "do_sample=True, temperature=1.0, top_k=50, top_p=0.7)" in card
    assert f"| eval/reward | 0.5 | {args.eval.samples} completions |" in card, "prompts of training"


def test_evaluations_on_held_out_prompts_are_named_so():
    args = PPOConfig.from_dict({"eval.every": 1, "eval.text": "I thought that"})
    card = model_card(args, ["length"], SUMMARY, evaluation={"eval/reward": 0.5})
    assert "completions of held-out prompts |" in card
    assert "temperature=1.0, top_k=0)" in card


def test_completions_of_one_prompt_count_as_one_in_the_error_of_a_term():
    measured = {"eval/reward/length": 0.5, "eval/reward_std/length": 0.2}
    args = PPOConfig.from_dict({"eval.every": 1, "eval.samples": 17, "eval.best_of": 4})
    card = model_card(args, ["length"], SUMMARY, evaluation=measured)
    assert "| eval/reward/length | 0.5 ± 0.05 (standard error) | 68 completions |" in card
    card = model_card(PPOConfig.from_dict({"eval.every": 1, "eval.samples": 1}), [], SUMMARY, evaluation=measured)
    assert "| eval/reward/length | 0.5 | 1 " in card


def test_sampling_of_evaluations_is_named_and_greedy_ones_have_no_error():
    measured = {"eval/reward/length": 0.5, "eval/reward_std/length": 0.2}
    args = PPOConfig.from_dict({"eval.every": 1, "eval.temperature": 0, "eval.max_new_tokens": 8})
    card = model_card(args, ["length"], SUMMARY, evaluation=measured)
    assert "| eval/reward/length | 0.5 | 64 completions, most likely tokens, up to 8 tokens |" in card
    args = PPOConfig.from_dict({"eval.every": 1, "eval.temperature": 0.6})
    assert "(standard error) | 64 completions, temperature 0.6 |" in model_card(
        args, ["length"], SUMMARY, evaluation=measured
    )


def test_a_loop_by_hand_has_prompts_and_scores_from_python():
    card = model_card(PPOConfig(), [], SUMMARY, handed=["prompts", "completions"])
    assert (
        "for 2 iterations.\n\n- prompts and completions from calls in Python\n- reward: scores from calls in Py" in card
    )
    assert "This movie was really" not in card
    assert "- sampling" not in card
    sampled = model_card(PPOConfig(), [], SUMMARY, handed=["prompts"])
    assert "- prompts from calls in Python\n" in sampled
    assert "- sampling: temperature 1, up to 24 tokens\n" in sampled


def test_rewards_after_a_change_of_what_is_scored_are_named_so():
    summary = SUMMARY | {"iterations": 40, "reward_first": 0.3, "reward_last": 0.4}
    card = model_card(PPOConfig(), ["length"], summary)
    assert "| mean reward of the starting model |" in card
    assert "(mean of the last 5 iterations)" in card
    card = model_card(PPOConfig(), ["length"], summary | {"since": 38})
    assert "| mean reward after what is scored changed |" in card
    assert "(in the last iteration, after what is scored changed in iteration 39)" in card
