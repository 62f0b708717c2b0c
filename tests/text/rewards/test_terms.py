import asyncio
import json
import math
import re
import runpy
import shutil
import statistics
import sys
import warnings
from ast import literal_eval
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from helpers.models import loud
from tokencredit.errors import ConfigError
from tokencredit.settings.command_line import config_parser, to_config
from tokencredit.settings.data import ClassifierTerm, FunctionTerm, RewardModelTerm, RewardTerm
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.model_loading import resolve
from tokencredit.text.rewards.ready_made import count, length
from tokencredit.text.rewards.reward_models import Classifier, Reader, RewardModel, load
from tokencredit.text.rewards.terms import (
    NonFiniteScore,
    RewardError,
    Term,
    as_terms,
    build_terms,
    score,
    term_metrics,
)
from tokencredit.text.rewards.texts import joined, plain

BUILTIN = "builtin:reviews"
PROMPTS = ["This movie was really", "This movie was really"]
COMPLETIONS = [" wonderful, and I loved every minute.", " awful. I hated the script, and the acting was worse."]
DECODER = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24, "num_labels": 1}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("tokencredit.text.rewards.calls.FIRST_BACKOFF", 0.0)


def rate(terms, prompts=PROMPTS, completions=COMPLETIONS, lengths=(2, 3), finite=True, **columns):
    return score(terms, prompts, completions, columns, lengths, finite=finite)


def gives(*values, name="given", weight=1.0):
    return Term(name, weight, lambda prompts, completions: list(values))


def saved(folder, model, tokenizer, **changes):
    """A random model with weights large enough that texts differ, as a folder; `changes` go into its tokenizer."""
    torch.manual_seed(0)
    loud(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return str(folder)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory, tokenizer):
    """A decoder with one output that pads with its end-of-sequence token, as TRL's RewardTrainer saves GPT-2."""
    eos = tokenizer.eos_token_id
    config = GPT2Config(**DECODER, vocab_size=len(tokenizer), eos_token_id=eos, pad_token_id=eos)
    folder = tmp_path_factory.mktemp("models") / "scorer"
    return saved(folder, GPT2ForSequenceClassification(config), tokenizer, pad_token=tokenizer.eos_token)


def alone(folder, text, limit=None):
    """A model's outputs for one text, by the plainest code."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][-(limit or 10**6) :]
    with torch.no_grad():
        if getattr(model, "transformer", None) is None:
            return model(input_ids=torch.tensor([ids])).logits[0].tolist()
        return model.score(model.transformer(torch.tensor([ids])).last_hidden_state)[0, -1].tolist()


# Classifiers


def test_a_classifier_says_what_the_plain_model_says():
    folder = resolve(BUILTIN, "sentiment")
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
        got = Classifier(BUILTIN, "NEGATIVE", output)(PROMPTS, COMPLETIONS)
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=1e-5)


def test_a_score_does_not_depend_on_its_neighbours():
    classifier = Classifier(BUILTIN, "NEGATIVE", batch_size=2)
    texts = [" film" * 60, *COMPLETIONS, "", " a"]
    together = classifier([""] * 5, texts)
    assert together == pytest.approx([classifier([""], [text])[0] for text in texts], abs=1e-5)


def test_the_completion_alone():
    by_itself = Classifier(BUILTIN, "NEGATIVE", text="completion")
    assert by_itself(PROMPTS, COMPLETIONS) == Classifier(BUILTIN, "NEGATIVE")(["", ""], COMPLETIONS)


def test_labels_that_do_not_exclude_each_other_have_probabilities_of_their_own(tmp_path):
    shutil.copytree(resolve(BUILTIN, "sentiment"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_type": "multi_label_classification"}))
    logits = torch.tensor(Classifier(BUILTIN, "NEGATIVE", "logit")(PROMPTS, COMPLETIONS))
    got = Classifier(str(tmp_path / "model"), "NEGATIVE")(PROMPTS, COMPLETIONS)
    torch.testing.assert_close(torch.tensor(got), logits.sigmoid())


def test_the_roberta_family_has_fewer_positions_than_it_says(tmp_path, tokenizer):
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=18,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = saved(tmp_path / "roberta", RobertaForSequenceClassification(config), tokenizer, model_max_length=None)
    classifier = Classifier(folder, "LABEL_1")
    assert classifier.reader.limit == 18 - tokenizer.pad_token_id - 1
    with pytest.warns(UserWarning, match="reads at most"):
        assert math.isfinite(classifier([""], [" film" * 40])[0])


# Reward models


def test_a_reward_model_reads_its_last_token_whatever_stands_beside_it(reward_model):
    """Its end-of-sequence token is its pad token, so RewardTrainer never read it, and it is not read here."""
    terms = build_terms([RewardModelTerm(reward_model=reward_model, batch_size=2)], "cpu")
    assert terms[0].name == "scorer"
    completions = [" a", " wonderful film, and I loved it", " bad", ""]
    got = rate(terms, ["I say"] * 4, completions, [1] * 4).totals
    assert got == pytest.approx([alone(reward_model, "I say" + c)[0] for c in completions], abs=1e-4)
    assert max(got) - min(got) > 0.1


@pytest.mark.parametrize(
    ("in_config", "in_tokenizer", "read"),
    [
        ("other", None, "last"),
        ("other", "other", "last"),
        ("other", "eos", "last"),
        (None, "other", "last"),
        (None, "eos", "last"),
        (None, None, "last"),
        (-1, None, "last"),  # as in the first Llama's config.json
        ("text", None, "last"),
        ("eos", None, "before"),
        ("eos", "eos", "before"),
    ],
)
def test_a_decoder_is_read_where_it_was_trained(in_config, in_tokenizer, read, tokenizer):
    """At the appended end-of-sequence token; before it only where the model's own pad token is the same.

    `text` is a token that stands within the texts, and `last` and `before` are worked out from the logits of each
    position of each text by itself.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve(BUILTIN, "policy"))
    ids = {"other": 7, "eos": tokenizer.eos_token_id, "text": tokenizer(" film")["input_ids"][0]}
    tokenizer.pad_token = None if in_tokenizer is None else tokenizer.convert_ids_to_tokens(ids[in_tokenizer])
    torch.manual_seed(0)
    pad = ids.get(in_config, in_config)
    model = GPT2ForSequenceClassification(
        GPT2Config(**DECODER, initializer_range=0.3, vocab_size=len(tokenizer), pad_token_id=pad)
    ).eval()
    texts = [" a film", " good", " a wonderful film, and I loved it", "", " film", " not a film that I liked"]
    position = {"last": -1, "before": -2}[read]
    expected = []
    for text in texts:
        row = torch.tensor([tokenizer("I say" + text + tokenizer.eos_token)["input_ids"]])
        with torch.no_grad():
            expected.append(model.score(model.transformer(row).last_hidden_state)[0, position, 0].item())
            assert model(row).logits[0, 0].item() == pytest.approx(expected[-1], abs=1e-4), "as the model reads it"
    scorer = RewardModel("scorer", model, tokenizer, batch_size=3)
    assert scorer(["I say"] * len(texts), texts) == pytest.approx(expected, abs=1e-4)
    assert model.config.pad_token_id == pad, "the model is left as it was"
    assert min(abs(a - b) for a in expected for b in expected if a != b) > 1e-3


def test_a_vocabulary_that_leaves_no_token_to_pad_with(tokenizers):
    """A text that has all its tokens, beside one that would need padding."""
    tokenizer = tokenizers["unigram"]
    config = GPT2Config(**DECODER | {"n_positions": 64}, vocab_size=len(tokenizer), initializer_range=0.3)
    reader = Reader("small", GPT2ForSequenceClassification(config), tokenizer)
    reader.encode = lambda prompt, completion: list(range(len(tokenizer))) if completion == "all" else [5]
    together = reader.logits(["", ""], ["all", "one"])
    alone = [reader.model(torch.tensor([reader.encode("", text)])).logits[0] for text in ("all", "one")]
    torch.testing.assert_close(together, torch.stack(alone))


@pytest.mark.parametrize("kind", ["bert", "xlnet", "fnet"])
def test_padding_changes_no_score(kind, tokenizer):
    """BERT masks it; XLNet reads its last position and FNet mixes all of them, so texts of one length share a batch."""
    shapes = {
        "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
        "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
        "fnet": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **shapes[kind], vocab_size=len(tokenizer), initializer_range=0.3, num_labels=3)
    model = AutoModelForSequenceClassification.from_config(config)
    reader = Reader(kind, model, AutoTokenizer.from_pretrained(resolve(BUILTIN, "policy")))
    assert reader.pads == (kind == "bert")
    texts = [" a film", " good", " a wonderful film, and I loved it", " films", " not a film that I liked"]
    with torch.no_grad():
        alone = [model(torch.tensor([reader.encode("I say", text)])).logits[0] for text in texts]
    torch.testing.assert_close(reader.logits(["I say"] * 5, texts), torch.stack(alone), atol=1e-4, rtol=1e-4)


def test_a_model_that_cannot_read_a_text_is_refused(tokenizer):
    config = AutoConfig.for_model("xmod", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    config.vocab_size = len(tokenizer)
    model = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(
        ConfigError, match=r"a forward pass of 'many' on a text fails: ValueError: Input language unknown"
    ):
        RewardModel("many", model, AutoTokenizer.from_pretrained(resolve(BUILTIN, "policy")))


def test_a_long_text_of_a_reward_model_keeps_its_end(reward_model):
    scorer = RewardModel("scorer", *load(reward_model, "cpu"))
    with pytest.warns(UserWarning, match="'scorer' reads at most 24 tokens"):
        got = scorer([" film" * 40], [" was good"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer([" film" * 50], [" was good"])  # it warns once
    ids = scorer.reader.encode(" film" * 40, " was good")
    assert scorer.reader.tokenizer.decode(ids).endswith(" was good<|endoftext|>")
    assert got == pytest.approx(alone(reward_model, " film" * 40 + " was good", limit=23), abs=1e-4)


def test_conversations_go_through_the_reward_models_own_template(tmp_path, tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=1,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    folder = saved(
        tmp_path / "chat", LlamaForSequenceClassification(config), tokenizer, chat_template=TEMPLATE, pad_token=None
    )
    scorer = RewardModel("chat", *load(folder, "cpu"))
    prompt = [{"role": "user", "content": "Good?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("Yes.", "No, I did not like it.")]
    expected = [alone(folder, f"<user>Good?<assistant>{a[0]['content']}")[0] for a in answers]
    assert scorer([prompt, prompt], answers) == pytest.approx(expected, abs=1e-4)


def test_without_a_template_the_contents_stand_below_each_other(reward_model):
    scorer = RewardModel("scorer", *load(reward_model, "cpu"))
    prompt, answer = [{"role": "user", "content": "Good?"}], [{"role": "assistant", "content": "Yes."}]
    assert scorer([prompt], [answer]) == scorer(["Good?\n"], ["Yes."])


def test_plain_texts_of_messages():
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answer = [{"role": "assistant", "content": "Hello"}]
    assert plain(chat) == "Be kind.\nHi"
    assert joined(chat, answer) == "Be kind.\nHi\nHello"
    assert joined("Be", " kind") == "Be kind"
    assert plain([{"role": "assistant", "content": None}]) == ""
    assert plain([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]) == "Hi"


# What cannot be loaded


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"classifier": BUILTIN, "label": "BAD"}, r"has no label 'BAD'; set label: one of NEGATIVE, POSITIVE"),
        ({"reward_model": BUILTIN}, r"'builtin:reviews' has 2 outputs, .* set it as classifier"),
        ({"function": "lenght"}, r"'lenght' is none of the ready-made ones, length, count, .*'path/file\.py:name'"),
        ({"function": "count"}, r"count needs text; give it in kwargs"),
        ({"function": "length", "kwargs": {"units": "words"}}, r"kwargs has 'units', which length does not take"),
        (
            {"function": "regex", "kwargs": {"pattern": "("}},
            r"pattern is '\(', which is not a valid regular expression",
        ),
        ({"function": "nowhere.py:f"}, r"there is no reward file 'nowhere\.py'"),
        ({"function": "no_such_package.rewards:f"}, r"'no_such_package\.rewards' cannot be imported: ModuleNotFound"),
        ({"function": "math:sqr"}, r"'math' has no 'sqr'; did you mean 'sqrt'\?"),
        ({"function": "math:pi"}, r"'pi' of 'math' is a float, not a function"),
    ],
)
def test_terms_that_cannot_be_had(term, message):
    with pytest.raises(ConfigError, match=r"^reward\[1\]:? .*" + message):
        build_terms([FunctionTerm(function="length"), RewardTerm.read(term)], "cpu")


def test_a_folder_that_is_no_classifier_is_refused(tmp_path, model_folders, reward_model):
    for folder, message in (
        (tmp_path, "is not a model folder"),
        (model_folders["gpt2"], r"is not a sequence classifier: its weights lack score\.weight"),
        (reward_model, "has one output and no labels to choose from; set it as reward_model"),
    ):
        with pytest.raises(ConfigError, match=rf"reward\[0\]: .*{message}"):
            build_terms([ClassifierTerm(classifier=str(folder), label="A")], "cpu")


def test_damaged_weights_are_refused(tmp_path):
    shutil.copytree(resolve(BUILTIN, "sentiment"), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"classifier.weight": torch.zeros(3, 5)}, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="cannot load a classifier from"):
        load(str(tmp_path / "model"), "cpu")
    weights.write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot load a classifier from"):
        load(str(tmp_path / "model"), "cpu")


def test_a_vocabulary_that_does_not_match_its_tokenizer(tmp_path, reward_model):
    shutil.copytree(reward_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = len(tokenizer) - 1
    with pytest.raises(
        ConfigError, match=rf"tokenizer of .* has {rows + 1} tokens, but its model's embedding only {rows}"
    ):
        build_terms([RewardModelTerm(reward_model=str(tmp_path / "model"))], "cpu")


def test_two_terms_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"reward\[1\]\.name is 'NEGATIVE', the name of another term"):
        build_terms([ClassifierTerm(classifier=BUILTIN), ClassifierTerm(classifier=BUILTIN, output="logit")], "cpu")


# Functions from files, modules and Python

FILE = """
from dataclasses import dataclass

@dataclass
class Settings:
    factor: float = 2.0

def shout(prompts, completions, factor=Settings().factor, **columns):
    return [factor * c.count("!") for c in completions]
"""


def test_functions_of_a_file(tmp_path):
    file = tmp_path / "math.py"  # hides no module of that name, and is hidden by none
    file.write_text(FILE)
    terms = build_terms(
        [
            FunctionTerm(function=f"{file}:shout"),
            FunctionTerm(function=f"{file}:shout", kwargs={"factor": 3}, name="b"),
        ],
        "cpu",
    )
    assert [term.name for term in terms] == ["shout", "b"]
    assert rate(terms, ["", ""], ["oh!", "oh"]).terms == {"shout": [2.0, 0.0], "b": [3.0, 0.0]}
    assert rate(terms[1:], ["", ""], ["oh!", "oh"], factor=[7, 7]).totals == [3.0, 0.0]  # settings before columns
    with pytest.raises(ConfigError, match=r"math\.py' has no 'shoot'; did you mean 'shout'\?"):
        build_terms([FunctionTerm(function=f"{file}:shoot")], "cpu")


def test_a_function_of_a_module():
    terms = build_terms([FunctionTerm(function="json:dumps")], "cpu")
    assert terms[0].function is json.dumps
    assert terms[0].name == "dumps"


def test_what_pythons_callers_have(reward_model):
    def mine(completions):
        return [1.0] * len(completions)

    model, _ = load(reward_model, "cpu")
    given = [mine, partial(rate_by, factor=2), count("."), reward_model, Term("other", 0.5, model_free)]
    terms = as_terms(given)
    assert [(t.name, t.weight) for t in terms] == [
        ("mine", 1.0),
        ("rate_by", 1.0),
        ("count", 1.0),
        ("scorer", 1.0),
        ("other", 0.5),
    ]
    loaded = as_terms(model)
    assert loaded[0].name == "scorer"
    assert rate(loaded).totals == pytest.approx(rate(as_terms(reward_model)).totals)


def rate_by(prompts, completions, factor, **columns):
    return [factor * 1.0 for _ in completions]


def model_free(prompts, completions):
    return [0.0 for _ in completions]


def test_what_python_callers_cannot_give(tokenizer):
    with pytest.raises(ConfigError, match=r"reward_funcs\[1\]: 3 is neither a function, nor"):
        as_terms([model_free, 3])
    with pytest.raises(ConfigError, match=r"reward_funcs\[1\]\.name is 'model_free'.*Term\(name, weight, function\)"):
        as_terms([model_free, model_free])
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(tokenizer), num_labels=1)
    with pytest.raises(ConfigError, match="no tokenizer for the reward model ''"):
        as_terms(GPT2ForSequenceClassification(config))


# What functions get and give


def test_terms_are_weighted_and_kept_apart():
    scores = rate([gives(1.0, 2.0, name="a", weight=2.0), gives(4, False, name="b", weight=-0.5)])
    assert scores.totals == [0.0, 4.0]
    assert scores.terms == {"a": [1.0, 2.0], "b": [4.0, 0.0]}
    assert scores.dense is None


def test_functions_get_what_they_name():
    got = {}

    def everything(prompts, completions, **columns):
        got["everything"] = (prompts, completions, columns)
        return [0.0, 0.0]

    def named(completions, answer):
        got["named"] = (completions, answer)
        return [0.0, 0.0]

    def placed(p, c, answer=None):
        got["placed"] = (p, c, answer)
        return [0.0, 0.0]

    class Callable:
        def __call__(self, completions, missing="default"):
            got["callable"] = (completions, missing)
            return [0.0, 0.0]

    functions = {"everything": everything, "named": named, "placed": placed, "callable": Callable()}
    rate([Term(name, 1.0, function) for name, function in functions.items()], answer=["a", "b"])
    assert got == {
        "everything": (PROMPTS, COMPLETIONS, {"answer": ["a", "b"]}),
        "named": (COMPLETIONS, ["a", "b"]),
        "placed": (PROMPTS, COMPLETIONS, ["a", "b"]),
        "callable": (COMPLETIONS, "default"),
    }


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(
        ConfigError, match=r"the reward 'f' needs answer; there are completions, label, prompts; others .*dataset"
    ):
        rate([Term("f", 1.0, lambda completions, answer: [0.0, 0.0])], label=[1, 2])
    with pytest.raises(ConfigError, match=r"the reward 'f' needs texts"):
        rate([Term("f", 1.0, lambda texts: [0.0, 0.0])])


def test_none_means_that_the_term_does_not_apply():
    scores = rate([gives(None, 2.0, name="a"), gives(1.0, 1.0, name="b", weight=0.5)])
    assert scores.totals == [0.5, 2.5]
    assert scores.terms["a"] == [None, 2.0]


def test_a_list_a_completion_is_a_reward_a_token():
    terms = [
        gives([1.0, 2.0], [0.0, 0.0, 5.0], name="a", weight=2.0),
        gives(torch.tensor([1.0, 1.0]), None, name="b"),
        gives(0.5, [1.0, 0.0, 0.0], name="mixed"),
    ]
    scores = rate(terms)
    assert scores.totals == [0.5, 0.0]
    assert scores.dense == [[3.0, 5.0], [1.0, 0.0, 10.0]]
    assert scores.terms == {"a": [3.0, 5.0], "b": [2.0, None], "mixed": [0.5, 1.0]}


def test_tensors_and_arrays_are_numbers_too():
    scores = rate([Term("t", 1.0, lambda completions: torch.tensor([1.0, 2.0]))])
    assert scores.totals == [1.0, 2.0]
    assert rate([gives(torch.tensor(1.0), torch.tensor(3).numpy())]).totals == [1.0, 3.0]


def test_coroutine_functions_run_together():
    """Each waits for the other, so that one after the other would never end."""
    arrived = []

    def waiting(name):
        async def function(prompts, completions, **columns):
            arrived.append(name)
            while len(arrived) < 2:
                await asyncio.sleep(0.001)
            return [float(len(c)) for c in completions]

        return Term(name, 1.0, function)

    terms = [waiting("a"), Term("sync", 1.0, model_free), waiting("b")]
    expected = [2.0 * len(c) for c in COMPLETIONS]
    assert rate(terms).totals == expected

    async def in_a_notebook():
        return rate(terms).totals

    assert asyncio.run(in_a_notebook()) == expected


# What goes wrong


BROKEN = """import json, statistics


def helper(completion):
    return json.loads(completion)["score"]


def parsed(completions):
    return [helper(completion) for completion in completions]
"""


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_an_exception_is_located_in_user_code(timeout, tmp_path):
    """The json module raises; line 5 is the innermost of the user's."""
    file = tmp_path / "mine.py"
    file.write_text(BROKEN)
    terms = build_terms([FunctionTerm(function=f"{file}:parsed", retries=0, timeout=timeout)], "cpu")
    with pytest.raises(RewardError, match=rf"JSONDecodeError: .* at {re.escape(str(file))}:5; its prompt was"):
        rate(terms)


def test_an_exception_without_user_code_has_no_place():
    count_words = Term("count", 1.0, partial(statistics.mean, []), retries=0)
    with pytest.raises(RewardError, match=r"raised \w+: [^/]*; its prompt was"):
        rate([count_words])


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_function_that_exits_fails_its_call_and_not_the_process(timeout, tmp_path):
    def leaves(completions):
        sys.exit(0)

    with pytest.raises(RewardError, match=r"^reward term 'leaves' called sys\.exit\(0\)$"):
        rate([Term("leaves", 1.0, leaves, retries=0, timeout=timeout)])
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match=r"cannot be run: SystemExit: 3$"):
        build_terms([FunctionTerm(function=f"{tmp_path}/leaves.py:reward")], "cpu")


def test_a_sum_that_float32_cannot_hold_is_not_finite():
    huge = Term("huge", 10.0, lambda completions: [1e38] * len(completions))
    with pytest.raises(NonFiniteScore, match=r"^the weighted sum of the rewards reaches 1e\+39, .* in float32$"):
        rate([huge])


def test_a_function_that_raises_on_the_whole_only():
    def small(completions):
        if len(completions) > 1:
            raise ValueError("too many")
        return [0.0]

    with pytest.raises(
        RewardError,
        match=r"ValueError: too many at .* on a batch of 2 completions, but on none of them alone",
    ):
        rate([Term("small", 1.0, small)])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"reward term 'odd' returned 1 numbers for 2 completions"),
        (None, r"returned a NoneType; it must return a list"),
        ("ab", r"returned a str; it must return a list"),
        ([1.0, "good"], r"reward term 'odd' is 'good' for the text 'This movie was really awful.*it must be a number"),
        ([[1.0, 2.0], [1.0]], r"'odd' gave 1 numbers for the 3 tokens of the text 'This movie was really awful"),
        ([[1.0, None], None], r"'odd' is None for the text .*wonderful"),
        ([None, None], r"no reward term scored any completion: odd returned None for all"),
    ],
)
def test_results_that_are_no_rewards(result, message):
    with pytest.raises(RewardError, match=message):
        rate([Term("odd", 1.0, lambda completions: result)])


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_reward_that_is_not_finite_names_term_and_text(bad):
    with pytest.raises(NonFiniteScore, match=rf"reward term 'odd' is {bad} for the text .*hated"):
        rate([gives(0.5, bad, name="odd")])
    with pytest.raises(NonFiniteScore, match=rf"reward term 'odd' is {bad} for the text .*loved"):
        rate([gives([0.5, bad], None, name="odd")])


def test_scores_that_are_not_finite_can_be_returned():
    scores = rate([gives(0.5, math.inf, name="odd"), gives(1.0, 1.0, name="one", weight=2.0)], finite=False)
    assert scores.totals == [2.5, math.inf]


# Statistics


def test_statistics_by_hand():
    """b is 2a + 1 where both apply. With c it shares three completions: deviations −8/3, −2/3, 10/3 and 1, −1, 0."""
    terms = {"a": [1.0, 2.0, 6.0, None], "b": [3.0, 5.0, None, 9.0], "c": [2.0, 0.0, 1.0, 1.0], "k": [0.1] * 4}
    metrics = term_metrics(terms, lambda x: x)
    expected = {
        "reward/a": 3.0,
        "reward_std/a": math.sqrt((4 + 1 + 9) / 3),
        "reward/b": 17 / 3,
        "reward_std/c": math.sqrt(0.5),
        "reward_std/k": 0.0,
        "reward_corr/a/b": 1.0,
        "reward_corr/b/c": -2 / math.sqrt(168 / 9 * 2),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert math.isnan(metrics["reward_corr/a/k"])
    assert len(metrics) == 4 + 4 + 6


def test_statistics_of_two_processes_are_those_of_one():
    torch.manual_seed(0)
    a, b = torch.randn(20).tolist(), torch.randn(20).tolist()
    b[3] = a[15] = None
    whole = term_metrics({"a": a, "b": b}, lambda x: x)
    sums = []

    def record(x):
        sums.append(x)
        return x

    halves = [{"a": a[:8], "b": b[:8]}, {"a": a[8:], "b": b[8:]}]
    for half in halves:
        term_metrics(half, record)
    first = sums[0] + sums[2]  # the second pass needs the means of the whole, so it is asked for again with them

    def both(half, second=None):
        seen = []

        def reduce(x):
            seen.append(x)
            return first if len(seen) == 1 else (x if second is None else second)

        return term_metrics(half, reduce), seen[1]

    second = sum(both(half)[1] for half in halves)
    for half in halves:
        assert both(half, second)[0] == pytest.approx(whole, abs=1e-6)


def test_a_term_that_never_applies_has_no_statistics():
    metrics = term_metrics({"a": [None, None], "b": [1.0, 3.0]}, lambda x: x)
    assert math.isnan(metrics["reward/a"])
    assert math.isnan(metrics["reward_corr/a/b"])
    assert metrics["reward/b"] == 2.0


# From the command line and from files


def test_terms_from_yaml_and_from_flags(tmp_path):
    parser = config_parser(PPOConfig)
    file = tmp_path / "run.yaml"
    terms = [{"function": "count", "kwargs": {"text": "."}, "weight": 0.1}, {"classifier": BUILTIN, "output": "logit"}]
    file.write_text(yaml.safe_dump({"reward": terms}))
    config = to_config(parser.read(["--config", str(file)]), PPOConfig)
    assert config.reward == [RewardTerm.read(term) for term in terms]
    flag = "[{function: length, weight: 0.1, retries: 5, timeout: 1.5}, {function: distinct, kwargs: {n: 3}}]"
    built = build_terms(to_config(parser.read(["--reward", flag]), PPOConfig).reward, "cpu")
    assert [(term.retries, term.timeout) for term in built] == [(5, 1.5), (2, None)]
    scores = rate(built)
    assert scores.terms == {"length": [6.0, 10.0], "distinct": [1.0, 1.0]}
    assert scores.totals == pytest.approx([1.6, 2.0])


def test_a_ready_made_function_mistakes_no_column_for_a_setting():
    """A ready-made function's settings are its own, whatever the data set's columns are called."""
    assert rate([Term("length", 1.0, length())], unit=["x", "y"]).totals == [6.0, 10.0]


def test_the_example_of_the_docs(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "as_terms" in block)
    (tmp_path / "example.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "example.py"))
    claims = re.findall(r"^scores\.(\w+) +# (.+)$", code, re.MULTILINE)
    assert len(claims) == 2
    for name, value in claims:
        assert getattr(names["scores"], name) == literal_eval(value)
