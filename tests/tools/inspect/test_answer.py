import pytest

from tokencredit.tools.inspect.answer import Numbers, record, sentence
from tokencredit.tools.inspect.parts import Part
from tokencredit.tools.inspect.patching import UNEMBEDDING

MLP, HEAD = Part("mlp", 2), Part("head", 1, 3)
NUMBERS = Numbers(
    base=-1.0,
    tuned=3.0,
    patched={MLP: 1.0, HEAD: 0.0},
    shares={MLP: 0.5, HEAD: 0.25},
    direct=({MLP: 0.1, HEAD: 0.2}, {MLP: 2.0, HEAD: 0.3}),
    top=[MLP, HEAD],
    together=1.8,
    others=[],
)


def say(**changes):
    return sentence(NUMBERS._replace(**changes), [" bad"], [" good", " fine"], unchanged=False)


def test_the_whole_answer():
    assert say() == (
        "The log-odds of ' bad' against ' good', ' fine' were -1.00 nats before training, and are 3.00 now. Layer 2 "
        "MLP carries 50 % of the change: patched in alone, it brings them to 1.00. It hardly did so before training: "
        "its direct contribution was +0.10 and is +2.00 nats. The five strongest parts together carry 70 %."
    )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1.0, 2.0, "It pushed the same way before training, less strongly: its direct contribution was +1.00 and"),
        (-1.0, 2.0, "It pushed the other way before training: its direct contribution was -1.00 and is +2.00 nats."),
        (2.0, 1.0, "It works through later parts: its direct contribution was +2.00 and is +1.00 nats."),
        (-2.0, -1.0, "It works through later parts"),
    ],
)
def test_before_training(before, after, expected):
    assert expected in say(direct=({MLP: before}, {MLP: after}))


def test_towards_lower_log_odds():
    direct = ({MLP: -1.0}, {MLP: -2.0})
    assert "pushed the same way before" in say(base=3.0, tuned=-1.0, direct=direct)
    assert "pushed the other way before" in say(base=3.0, tuned=-1.0, direct=({MLP: 1.0}, {MLP: -2.0}))


def test_other_completions():
    others = [[0.2, None, 0.6], [0.1, None, 0.2]]
    assert "In 2 other completions it carries 40 % in the median, from 20 % to 60 %. The five" in say(others=others)
    others = [[0.2, 0.6], [0.9, 0.8]]
    assert "from 20 % to 60 %; layer 1 head 3 carries more there, 85 %. The" in say(others=others)
    assert "other completions" not in say(others=[[None], [None]])


def test_nothing_stands_out():
    text = say(shares={MLP: 0.15, HEAD: 0.1})
    assert text.startswith("No part stands out. The log-odds")
    assert "The strongest part, layer 2 MLP, carries 15 %." in text


def test_hardly_changed():
    start = "The log-odds of ' bad' against ' good', ' fine' hardly changed: -1.00 nats before training, -0.90 now."
    assert say(tuned=-0.9).startswith(start)


def test_against_another_model_nothing_is_said_of_training():
    for changed in ({}, {"tuned": -0.9}, {"direct": ({MLP: 1.0}, {MLP: 2.0})}):
        text = sentence(NUMBERS._replace(**changed), ["a"], ["b"], unchanged=False, before="in runs/other")
        assert "nats in runs/other" in text
        assert "raining" not in text


def test_no_weight_changed():
    assert sentence(NUMBERS, ["a"], ["b"], unchanged=True) == "No weight changed: the two models are the same."


def test_the_unembedding():
    text = say(top=[UNEMBEDDING, MLP], shares={UNEMBEDDING: 0.6, MLP: 0.1}, patched={UNEMBEDDING: 1.4})
    assert (
        "Final norm and unembedding carries 60 % of the change: patched in alone, it brings them to 1.40. The" in text
    )


def test_record():
    written = record(NUMBERS._replace(top=[MLP, UNEMBEDDING], shares={MLP: 0.5, UNEMBEDDING: None}), "text")
    assert written == {
        "sentence": "text",
        "top": [
            {"name": "layer 2 mlp", "share": 0.5, "base": 0.1, "tuned": 2.0, "others": []},
            {"name": "unembedding", "share": None, "base": None, "tuned": None, "others": []},
        ],
    }
