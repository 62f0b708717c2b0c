import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tokencredit.runs.config import RewardTerm
from tokencredit.runs.errors import ConfigError
from tokencredit.text.models import resolve
from tokencredit.text.rewards import Classifier, NonFiniteReward, Term, build_terms, score

PROMPTS = ["This movie was really", "This movie was really"]
COMPLETIONS = [" wonderful, and I loved every minute.", " awful. I hated the script, and the acting was worse."]


def test_a_classifier_says_what_the_plain_model_says():
    folder = resolve("builtin:reviews", "sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(folder)(
        [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        logits = model(**inputs).logits
    negative = model.config.label2id["NEGATIVE"]
    by_output = {
        "probability": logits.softmax(-1)[:, negative],
        "logit": logits[:, negative],
        "log_odds": logits[:, negative] - logits[:, 1 - negative],
    }
    for output, expected in by_output.items():
        got = Classifier("builtin:reviews", "NEGATIVE", output)(PROMPTS, COMPLETIONS)
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=1e-5)


def test_the_built_in_classifier_tells_good_from_bad():
    good, bad = Classifier("builtin:reviews", "NEGATIVE")(PROMPTS, COMPLETIONS)
    assert good < 0.2 < 0.8 < bad


def test_a_score_does_not_depend_on_its_neighbours():
    classifier = Classifier("builtin:reviews", "NEGATIVE")
    together = classifier([*PROMPTS, "A"], [*COMPLETIONS, " film" * 60])
    alone = [classifier([p], [c])[0] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert together[:2] == pytest.approx(alone, abs=1e-5)


def test_terms_are_weighted_and_kept_apart():
    terms = [Term("a", 2.0, lambda prompts, completions: [1.0, 2.0]), Term("b", -0.5, lambda p, c: [4.0, 0.0])]
    assert score(terms, PROMPTS, COMPLETIONS) == ([0.0, 4.0], {"a": [1.0, 2.0], "b": [4.0, 0.0]})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_term_and_text(bad):
    with pytest.raises(NonFiniteReward, match=rf"reward term 'odd' is {bad} for the text .*hated"):
        score([Term("odd", 1.0, lambda prompts, completions: [0.5, bad])], PROMPTS, COMPLETIONS)


def test_a_label_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"reward\[0\]: .* has no label 'BAD'; its labels are NEGATIVE, POSITIVE"):
        build_terms([RewardTerm(label="BAD")], "cpu")


def test_a_folder_that_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\[1\]: .* is not a model folder"):
        build_terms([RewardTerm(), RewardTerm(classifier=str(tmp_path), name="other")], "cpu")


def test_two_terms_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"reward\[1\]\.name is 'NEGATIVE', as another term's is"):
        build_terms([RewardTerm(), RewardTerm(output="logit")], "cpu")
