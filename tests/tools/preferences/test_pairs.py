"""Pairs: which completions of a group make one, and that a file of them holds what was sampled."""

import json
import math
from collections import Counter

import pytest
from datasets import load_dataset

from helpers.commands import refused
from helpers.files import read_jsonl
from helpers.models import with_chat_template
from tokencredit.cli import main
from tokencredit.tools.preferences.labels import read_pairs
from tokencredit.tools.preferences.pairs import choose

LENGTH = "[{function: length, kwargs: {unit: characters}}]"
SMALL = ["--max_new_tokens", "6", "--dtype", "float32", "--reward", LENGTH]
FILM = ["--prompts.text", "This movie was really"]
INF, NAN = math.inf, math.nan


def counts(unscored=0, not_finite=0, duplicates=0, ties=0, within=0):
    found = {"unscored": unscored, "not_finite": not_finite, "duplicate_completions": duplicates}
    return Counter(found | {"ties": ties, "within_margin": within})


@pytest.mark.parametrize(
    ("texts", "rewards", "kind", "margin", "pairs", "left_out"),
    [
        ("abc", [1, 3, 2], "best-worst", 0, [(1, 0)], counts()),
        ("abc", [1, 3, 2], "all", 0, [(1, 2), (1, 0), (2, 0)], counts()),
        ("abc", [1, 3, 2], "all", 2, [(1, 0)], counts(within=2)),
        ("abc", [1, 1, 2], "all", 0, [(2, 0), (2, 1)], counts(ties=1)),
        ("abc", [1, 1, 1], "best-worst", 0, [], counts(ties=1)),
        ("aab", [1, 9, 2], "all", 0, [(2, 0)], counts(duplicates=1)),
        ("aaa", [1, 2, 3], "best-worst", 0, [], counts(duplicates=2)),
        ("abc", [1, NAN, 2], "best-worst", 0, [(2, 0)], counts(not_finite=1)),
        ("abc", [INF, -INF, 2], "all", 0, [], counts(not_finite=2)),
        ("aab", [NAN, 1, 2], "all", 0, [(2, 1)], counts(not_finite=1)),
        ("abc", [1, None, 2], "best-worst", 0, [(2, 0)], counts(unscored=1)),
        ("aabc", [0, 0, 0, 0], "unranked", 0, [(0, 2)], counts(duplicates=1)),
    ],
)
def test_pairs_of_a_group(texts, rewards, kind, margin, pairs, left_out):
    assert choose(texts, rewards, kind, margin) == (pairs, left_out)


def write(tmp_path, name, *arguments, model="builtin:reviews"):
    """Run the command; its rows and its file of settings."""
    out = tmp_path / f"{name}.jsonl"
    assert main(["pairs", model, "--out", str(out), *arguments]) == 0
    return read_jsonl(out), json.loads(out.with_suffix(".json").read_text())


@pytest.mark.slow
def test_a_file_holds_ranked_pairs_of_what_was_sampled(tmp_path, capsys):
    from tokencredit.settings.run_kind import read_source
    from tokencredit.tools.scoring_options import SamplingOptions
    from tokencredit.tools.trained_policy import Policy

    rows, about = write(tmp_path, "pairs", *FILM, *SMALL, "--groups", "3", "--samples", "4", "--seed", "5")
    assert [set(row) for row in rows] == [
        {"prompt", "chosen", "rejected", "chosen_truncated", "rejected_truncated", "reward_chosen", "reward_rejected"}
    ] * 3
    for row in rows:
        assert row["prompt"] == "This movie was really"
        assert (len(row["chosen"]), len(row["rejected"])) == (row["reward_chosen"], row["reward_rejected"])
        assert row["reward_chosen"] > row["reward_rejected"]
    # The first group, sampled by hand with the same random numbers.
    policy = Policy(read_source("builtin:reviews"), options=SamplingOptions(max_new_tokens=6))
    sampled = policy.generate("This movie was really", 4, seed=5)
    assert (rows[0]["chosen"], rows[0]["rejected"]) == (max(sampled, key=len), min(sampled, key=len))
    assert (about["model"], about["seed"], about["sampling"]["max_new_tokens"]) == ("builtin:reviews", 5, 6)
    assert about["reward"][0]["kwargs"] == {"unit": "characters"}
    assert about["options"] == {
        "samples": 4,
        "groups": 3,
        "pairs": "best-worst",
        "margin": 0.0,
        "noise": 0.0,
        "batch_size": 64,
    }
    assert (about["counts"]["groups"], about["counts"]["completions"], about["counts"]["pairs"]) == (3, 12, 3)
    assert f"pairs{' ' * 20}3\n{tmp_path}/pairs.jsonl\n" in capsys.readouterr().out
    assert load_dataset("json", data_files=str(tmp_path / "pairs.jsonl"), split="train")[0] == rows[0]


@pytest.mark.slow
def test_the_seed_decides_and_the_batch_size_does_not(tmp_path):
    settings = [*FILM, *SMALL, "--groups", "5", "--pairs", "all"]
    first, _ = write(tmp_path, "first", *settings, "--batch_size", "64")
    assert write(tmp_path, "again", *settings, "--batch_size", "1")[0] == first
    assert write(tmp_path, "other", *settings, "--seed", "2")[0] != first


@pytest.mark.slow
def test_noise_flips_a_share_of_the_same_pairs_and_says_which(tmp_path):
    settings = [*FILM, *SMALL, "--groups", "40", "--samples", "2"]
    clean, _ = write(tmp_path, "clean", *settings)
    noisy, about = write(tmp_path, "noisy", *settings, "--noise", "0.3")
    assert len(noisy) == len(clean)
    for before, after in zip(clean, noisy, strict=True):
        assert (after["reward_chosen"] < after["reward_rejected"]) == after["flipped"]
        swapped = {"chosen": before["rejected"], "rejected": before["chosen"]}
        expected = before | swapped if after["flipped"] else before
        assert {key: after[key] for key in ("prompt", "chosen", "rejected")} == {
            key: expected[key] for key in ("prompt", "chosen", "rejected")
        }
    flipped = sum(row["flipped"] for row in noisy)
    assert about["counts"]["flipped"] == flipped
    assert 4 <= flipped <= 22, "12 are expected of 40"


@pytest.mark.slow
def test_equal_completions_and_pairs_are_dropped_and_counted(tmp_path):
    """At a low temperature a model repeats itself."""
    settings = [*FILM, *SMALL, "--groups", "12", "--samples", "3", "--temperature", "0.2", "--pairs", "all"]
    rows, about = write(tmp_path, "cold", *settings)
    counts = about["counts"]
    assert min(counts["duplicate_completions"], counts["duplicate_pairs"], counts["groups_without_pair"]) > 0
    keys = [frozenset((row["chosen"], row["rejected"])) for row in rows]
    assert len(set(keys)) == len(keys) == counts["pairs"]
    assert all(len(key) == 2 for key in keys)


@pytest.mark.slow
def test_scores_that_are_not_finite_and_completions_without_one_are_left_out(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def broken(completions, **columns):\n"
        "    kinds = (float('nan'), None, float('inf'), 1.0)\n"
        "    return [kinds[i] if i < 4 else float(i) for i in range(len(completions))]\n"
    )
    settings = [*FILM, *SMALL[:4], "--reward", f"[{{function: '{tmp_path}/reward.py:broken'}}]"]
    rows, about = write(tmp_path, "broken", *settings, "--groups", "2", "--samples", "4", "--batch_size", "8")
    assert [(row["reward_chosen"], row["reward_rejected"]) for row in rows] == [(7.0, 4.0)]
    found = {name: about["counts"][name] for name in ("not_finite", "unscored", "groups_without_pair", "pairs")}
    assert found == {"not_finite": 2, "unscored": 1, "groups_without_pair": 1, "pairs": 1}


@pytest.mark.slow
def test_conversations_keep_their_format(tmp_path):
    """With a prefilled answer too: the completion goes on with it, and the prompt is without it."""
    folder = with_chat_template(tmp_path / "chat")
    user, prefill = {"role": "user", "content": "Good?"}, {"role": "assistant", "content": "I think"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ([user], [user, prefill])))
    rows, _ = write(tmp_path, "pairs", "--prompts.dataset", str(data), *SMALL, model=str(folder))
    assert [row["prompt"] for row in rows] == [[user], [user]]
    for key in ("chosen", "rejected"):
        answers = [row[key] for row in rows]
        assert [[message["role"] for message in answer] for answer in answers] == [["assistant"]] * 2
        assert sum(answer[0]["content"].startswith("I think") for answer in answers) == 1


@pytest.mark.slow
def test_unranked_pairs_need_no_reward_and_can_be_labelled(tmp_path):
    settings = [*FILM, *SMALL[:4], "--samples", "2", "--groups", "3", "--pairs"]
    rows, about = write(tmp_path, "unranked", *settings, "unranked")
    assert [set(row) for row in rows] == [{"prompt", "a", "b", "a_truncated", "b_truncated"}] * 3
    ranked, _ = write(tmp_path, "ranked", *settings, "all", "--reward", "[{classifier: builtin:reviews}]")
    texts = [{row["chosen"], row["rejected"]} for row in ranked]
    assert [{row["a"], row["b"]} for row in rows] == texts, "the same samples"
    assert about["reward"] == []
    pairs = read_pairs(tmp_path / "unranked.jsonl", 1)
    assert [pair.key for pair in pairs] == [pair.key for pair in read_pairs(tmp_path / "ranked.jsonl", 1)]


@pytest.mark.slow
def test_a_run_brings_its_prompts_its_reward_and_its_sampling(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "prompts: {text: A film}\nreward: [{function: length}]\nrollout: {max_new_tokens: 5}\nseed: 7\n"
    )
    rows, about = write(tmp_path, "base", "--base", "--groups", "4", "--max_new_tokens", "5", model=str(tmp_path))
    assert {row["prompt"] for row in rows} == {"A film"}
    assert (about["which"], about["seed"], about["sampling"]["max_new_tokens"]) == ("base", 7, 5)


NO_FOLDER = "'x' is no folder here, and as a model of the hub it has no "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pairs needs MODEL, the folder of a run or a model, or a hub id"),
        (["x"], "--out is missing; give a new file that ends in .jsonl"),
        (["x", "--out", "pairs.json", *FILM, *SMALL], "--out is 'pairs.json'; it must be a file that ends in .jsonl"),
        (["x", "--out", "x.jsonl", *FILM], NO_FOLDER + "reward of its own; give --reward"),
        (["x", "--out", "x.jsonl", *SMALL], NO_FOLDER + "prompts of its own; give --prompts.text or"),
        (["x", "--out", "x.jsonl", "--samples", "1"], "samples is 1; it must be at least 2"),
        (["x", "--out", "x.jsonl", "--noise", "2"], "noise is 2.0; it must be at least 0 and at most 1"),
        (["x", "--out", "x.jsonl", "--pairs", "best"], "pairs is 'best'; it must be one of best-worst, all, unranked"),
        (["x", "--out", "x.jsonl", "--pairs", "unranked"], NO_FOLDER + "prompts of its own"),
        (
            ["x", "--out", "x.jsonl", "--pairs", "unranked", "--reward", LENGTH],
            "reward is given, which has no effect with pairs: unranked; leave one of them out",
        ),
        (["x", "--out", "x.jsonl", "--pairs", "unranked", "--noise", "0.1"], "noise is 0.1, which has no effect"),
        (
            ["x", "--out", "x.jsonl", *FILM, "--reward", "[{reward_model: m}]", "--reference", "y/z"],
            "reference is given, and only a reward's function could read its log-probs; leave it out",
        ),
        (["x", "--out", "x.jsonl", "--margn", "1"], "unknown key margn; did you mean margin?"),
        (["x", "--out", "x.jsonl", "--no-code", *FILM, "--reward", "[{function: a.py:f}]"], "runs a.py:f"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, "pairs", *arguments)


@pytest.mark.slow
def test_an_earlier_file_is_kept_and_a_search_without_a_pair_leaves_none(tmp_path, capsys):
    out = tmp_path / "pairs.jsonl"
    never = [*FILM, *SMALL[:4], "--reward", "[{function: count, kwargs: {text: zzz}}]"]
    assert main(["pairs", "builtin:reviews", "--out", str(out), *never]) == 1
    message = capsys.readouterr().err
    assert "no pair was found (groups 1, completions 4, " in message
    assert "ties 1" in message
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine\n")
    assert "exists already; give another file" in refused(capsys, "pairs", "builtin:reviews", "--out", str(out), *never)
    assert out.read_text() == "mine\n"
