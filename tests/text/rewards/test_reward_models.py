import json
import math
import shutil
import threading
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
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
from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.settings.data import ClassifierTerm, RewardModelTerm
from tokencredit.text.models.model_loading import resolve
from tokencredit.text.rewards.reward_models import Classifier, Reader, RewardModel, load
from tokencredit.text.rewards.terms import as_terms, build_terms

pytestmark = pytest.mark.slow

BUILTIN = "builtin:reviews"
PROMPTS = ["This movie was really", "This movie was really"]
COMPLETIONS = [" wonderful, and I loved every minute.", " awful. I hated the script, and the acting was worse."]
DECODER = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 24, "num_labels": 1}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


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


def classifier(name, *label, **reading):
    return Classifier(name, *load(name, "cpu"), *label, **reading)


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
        got = classifier(BUILTIN, "NEGATIVE", output)(PROMPTS, COMPLETIONS)
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=1e-5)


def test_a_score_does_not_depend_on_its_neighbours():
    scorer = classifier(BUILTIN, "NEGATIVE", batch_size=2)
    texts = [" film" * 60, *COMPLETIONS, "", " a"]
    together = scorer([""] * 5, texts)
    assert together == pytest.approx([scorer([""], [text])[0] for text in texts], abs=1e-5)


def test_the_completion_alone():
    by_itself = classifier(BUILTIN, "NEGATIVE", text="completion")
    assert by_itself(PROMPTS, COMPLETIONS) == classifier(BUILTIN, "NEGATIVE")(["", ""], COMPLETIONS)


def test_labels_that_do_not_exclude_each_other_have_probabilities_of_their_own(tmp_path):
    shutil.copytree(resolve(BUILTIN, "sentiment"), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_type": "multi_label_classification"}))
    logits = torch.tensor(classifier(BUILTIN, "NEGATIVE", "logit")(PROMPTS, COMPLETIONS))
    got = classifier(str(tmp_path / "model"), "NEGATIVE")(PROMPTS, COMPLETIONS)
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
    scorer = classifier(folder, "LABEL_1")
    assert scorer.limit == 18 - tokenizer.pad_token_id - 1
    with pytest.warns(UserWarning, match="reads at most"):
        assert math.isfinite(scorer([""], [" film" * 40])[0])


def test_a_reward_model_reads_its_last_token_whatever_stands_beside_it(reward_model):
    """Its end-of-sequence token is its pad token, so RewardTrainer never read it, and it is not read here."""
    terms = build_terms([RewardModelTerm(reward_model=reward_model, batch_size=2)], "cpu")
    assert terms[0].name == "scorer"
    completions = [" a", " wonderful film, and I loved it", " bad", ""]
    got = terms[0].function(["I say"] * 4, completions)
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


def test_a_call_that_goes_on_beside_another_changes_none_of_its_scores(tokenizers):
    """As one whose timeout is over; the second ends in the token that the first pads with."""
    tokenizer = tokenizers["unigram"]
    config = GPT2Config(**DECODER, vocab_size=len(tokenizer), initializer_range=0.3)
    reader = Reader("small", GPT2ForSequenceClassification(config), tokenizer)
    ids = {"a": [5, 6], "b": [7], "ends": [3, 0], "longer": [3, 4, 8]}
    reader.encode = lambda prompt, completion: ids[completion]
    alone, found = reader.logits(["", ""], ["ends", "longer"]), []
    second = threading.Thread(target=lambda: found.append(reader.logits(["", ""], ["ends", "longer"])))

    def begin_second(*_arguments):
        hook.remove()
        second.start()
        second.join(0.2)

    hook = reader.model.register_forward_pre_hook(begin_second)
    reader.logits(["", ""], ["a", "b"])
    second.join()
    torch.testing.assert_close(found[0], alone)
    assert reader.model.config.pad_token_id is None


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


@pytest.mark.parametrize("kind", ["llama", "bert", *proofs("gpt2", "opt")])
@pytest.mark.parametrize("pads_with_eos", [False, True])
def test_prefixes_read_in_one_pass_score_as_each_alone(kind, pads_with_eos, tokenizer):
    """Also with an end-of-sequence token after each, and where a prefix ends in the middle of a token."""
    shapes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    shapes |= {"ffn_dim": 48, "word_embed_proj_dim": 32} if kind == "opt" else {"intermediate_size": 48}
    pad = tokenizer.eos_token_id if pads_with_eos else None
    config = AutoConfig.for_model(kind, **shapes, vocab_size=len(tokenizer), num_labels=1, pad_token_id=pad)
    torch.manual_seed(0)
    model = loud(AutoModelForSequenceClassification.from_config(config))
    reader = RewardModel(kind, model, AutoTokenizer.from_pretrained(resolve(BUILTIN, "policy")))
    texts = [f" {x} film, and I loved every minute" for x in ("good", "wonderful")]
    prefixes = [text[:end] for text in texts for end in range(len(text) + 1)]
    alone = [reader(["I say"], [prefix])[0] for prefix in prefixes]
    assert reader.shares == (kind != "bert")
    sizes = []
    model.base_model.register_forward_hook(lambda *call: sizes.append(call[2].last_hidden_state[..., 0].numel()))
    assert reader(["I say"] * len(prefixes), prefixes) == pytest.approx(alone, abs=1e-4)
    assert max(alone) - min(alone) > 0.1
    tokens = sum(len(reader.encode("I say", prefix)) for prefix in prefixes)
    assert sum(sizes) < tokens / 2 if reader.shares else sum(sizes) >= tokens


def test_a_model_whose_tokens_see_a_window_reads_each_prefix_alone(tokenizer):
    shapes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(
        "mistral", **shapes, vocab_size=len(tokenizer), num_labels=1, sliding_window=4, num_key_value_heads=2
    )
    model = AutoModelForSequenceClassification.from_config(config)
    reader = RewardModel("windows", model, AutoTokenizer.from_pretrained(resolve(BUILTIN, "policy")))
    assert not reader.shares
    model.config.sliding_window = None
    assert reader._shares_beginnings()


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
    ids = scorer.encode(" film" * 40, " was good")
    assert scorer.tokenizer.decode(ids).endswith(" was good<|endoftext|>")
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
    blocks = [{"role": "user", "content": [{"type": "text", "text": "Good?"}]}]
    assert scorer([blocks, blocks], answers) == pytest.approx(expected, abs=1e-4)


def test_without_a_template_the_contents_stand_below_each_other(reward_model):
    scorer = RewardModel("scorer", *load(reward_model, "cpu"))
    prompt, answer = [{"role": "user", "content": "Good?"}], [{"role": "assistant", "content": "Yes."}]
    assert scorer([prompt], [answer]) == scorer(["Good?\n"], ["Yes."])


def test_a_folder_that_is_no_classifier_is_refused(tmp_path, model_folders, reward_model):
    for folder, message in (
        (tmp_path, "is not a model folder: it has no config.json"),
        (model_folders["gpt2"], r"is not a sequence classifier: its weights lack score\.weight"),
        (reward_model, "has one output and no labels to choose from; set it as reward_model"),
    ):
        with pytest.raises(ConfigError, match=rf"reward\[0\]: .*{message}"):
            build_terms([ClassifierTerm(classifier=str(folder), label="A")], "cpu")


def with_head(folder, model_folders, heads, file="model.safetensors"):
    """GPT-2 as a causal language model whose folder has these further weights, in this file."""
    shutil.copytree(model_folders["gpt2"], folder)
    own = load_file(folder / file) if (folder / file).is_file() else {}
    save_file(own | heads, folder / file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def value_head(model_folders):
    """TRL's value head for GPT-2: a weight and a bias."""
    return torch.randn(1, AutoConfig.from_pretrained(model_folders["gpt2"]).n_embd), torch.tensor([0.5])


@pytest.mark.parametrize(
    ("file", "layer"),
    [("model", "v_head.summary"), ("value_head", "v_head.summary"), ("model", "value_head")],
    ids=["TRL", "LLaMA-Factory", "without a bias"],
)
def test_a_language_models_value_head_at_the_last_token_is_its_score(file, layer, tmp_path, model_folders, value_head):
    weight, bias = value_head
    heads = {f"{layer}.weight": weight} | ({f"{layer}.bias": bias} if layer == "v_head.summary" else {})
    folder = with_head(tmp_path / "model", model_folders, heads, f"{file}.safetensors")
    (term,) = build_terms([RewardModelTerm(reward_model=str(folder))], "cpu")
    model, tokenizer = load(str(folder), "cpu")
    ids = torch.tensor([tokenizer(PROMPTS[0] + COMPLETIONS[0] + tokenizer.eos_token)["input_ids"]])
    expected = (model.transformer(ids).last_hidden_state[0, -1] @ weight[0]).item() + 0.5 * (len(heads) - 1)
    assert term.function(PROMPTS[:1], COMPLETIONS[:1]) == pytest.approx([expected], abs=1e-4)
    with pytest.raises(ConfigError, match="has one output and no labels to choose from; set it as reward_model"):
        build_terms([ClassifierTerm(classifier=str(folder), label="A")], "cpu")


def test_adapters_are_reward_models_with_a_value_head_beside_them_or_a_score_head_in_them(
    tmp_path, model_folders, value_head
):
    peft = pytest.importorskip("peft")
    weight, bias = value_head
    ids, scores = torch.tensor([[5, 6, 7]]), {}
    for name, auto, task in (
        ("llamafactory", AutoModelForCausalLM, "CAUSAL_LM"),
        ("classifier", AutoModelForSequenceClassification, "SEQ_CLS"),
    ):
        options = {"num_labels": 1} if task == "SEQ_CLS" else {}
        base = auto.from_pretrained(model_folders["gpt2"], **options)
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], task_type=task, init_lora_weights=False, fan_in_fan_out=True
        )
        model = peft.get_peft_model(base, config).eval()
        model.save_pretrained(tmp_path / name)
        base.config.pad_token_id = 0
        if task == "SEQ_CLS":
            scores[name] = model(ids).logits[0, 0].item()
        else:
            states = model(ids, output_hidden_states=True).hidden_states[-1]
            scores[name] = (states[0, -1] @ weight[0] + bias).item()
    with pytest.raises(ConfigError, match=r"is not a sequence classifier: its weights lack score\.weight"):
        load(str(tmp_path / "llamafactory"), "cpu")
    heads = {"v_head.summary.weight": weight, "v_head.summary.bias": bias}
    save_file(heads, tmp_path / "llamafactory" / "value_head.safetensors")
    for name, expected in scores.items():
        model, _ = load(str(tmp_path / name), "cpu")
        model.config.pad_token_id = 0
        assert model(ids).logits[0].tolist() == pytest.approx([expected], abs=1e-4)
    broken = with_head(tmp_path / "broken", model_folders, heads)
    own = {key: x for key, x in load_file(broken / "model.safetensors").items() if ".h.0." not in key}
    save_file(own, broken / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "classifier" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(broken)}))
    for folder in (broken, config.parent):  # a head makes up for itself alone
        with pytest.raises(ConfigError, match=r"its weights lack transformer\.h\.0\."):
            load(str(folder), "cpu")


@pytest.mark.parametrize("labels", [1, 2])
def test_a_loaded_language_model_is_no_reward_model(model_folders, labels):
    model = AutoModelForCausalLM.from_pretrained(model_folders["gpt2"], num_labels=labels)
    with pytest.raises(ConfigError, match=r"is a GPT2LMHeadModel, .* AutoModelForSequenceClassification"):
        as_terms(model)


def test_a_reward_model_without_its_tokenizer_is_refused(tmp_path, reward_model):
    for file in ("config.json", "model.safetensors"):
        shutil.copy(f"{reward_model}/{file}", tmp_path)
    for rewards in (str(tmp_path), AutoModelForSequenceClassification.from_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match=r"has no tokenizer; save one there|cannot load a tokenizer"):
            as_terms(rewards)


def test_damaged_weights_are_refused(tmp_path):
    shutil.copytree(resolve(BUILTIN, "sentiment"), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"classifier.weight": torch.zeros(3, 5)}, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"classifier\.weight has the shape"):
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


def test_a_loaded_reward_model_is_a_term_like_its_folder(reward_model):
    (loaded,), (named,) = as_terms(load(reward_model, "cpu")[0]), as_terms(reward_model)
    assert loaded.name == named.name == "scorer"
    assert loaded.function(PROMPTS, COMPLETIONS) == pytest.approx(named.function(PROMPTS, COMPLETIONS))
