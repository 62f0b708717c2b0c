"""Rows of a data set as token ids."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from helpers.models import SHAPE, random_lm
from tokencredit.errors import ConfigError
from tokencredit.settings.offline import CompletionsConfig, DPOPairsConfig, PairsConfig, RowsSettings
from tokencredit.settings.projects.llama_factory import LLAMA_FACTORY
from tokencredit.text.offline.examples import Encoder, examples_of, read_rows, split

ROWS = [{"prompt": "The film is", "completion": " bad."}, {"prompt": "I thought it was", "completion": " a great joy."}]


@pytest.fixture(scope="module")
def lm(tokenizer):
    return random_lm("gpt2", tokenizer, **SHAPE)


def read(rows, config, lm, tokenizer, column="completion", **options):
    encoder = Encoder(config, lm, tokenizer, **options)
    found = read_rows(config, tokenizer, column, config, rows)
    return examples_of(found, lambda row: encoder.with_completion(row, column))


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_loss_on_the_completion_and_its_end(lm, tokenizer):
    examples, dropped = read(ROWS, CompletionsConfig(), lm, tokenizer)
    prompt, completion = ids(tokenizer, "The film is"), [*ids(tokenizer, " bad."), tokenizer.eos_token_id]
    assert examples[0] == {"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}
    assert dropped == 0
    everywhere, _ = read(ROWS, CompletionsConfig(), lm, tokenizer, loss_on="all")
    assert everywhere[0]["labels"] == everywhere[0]["input_ids"] == prompt + completion


def test_a_truncated_completion_has_no_end(lm, tokenizer):
    (cut, whole), _ = read(
        [ROWS[0] | {"completion_truncated": True}, ROWS[0] | {"completion_truncated": False}],
        CompletionsConfig(),
        lm,
        tokenizer,
    )
    assert [*cut["input_ids"], tokenizer.eos_token_id] == whole["input_ids"]


def test_a_template_makes_the_prompt(lm, tokenizer):
    rows = [{"instruction": "Judge", "input": "", "completion": " bad"}, {"instruction": "Judge", "input": "it"}]
    config = CompletionsConfig(template="{{ instruction }}{% if input %} {{ input }}{% endif %}:")
    examples, _ = read([row | {"completion": " bad"} for row in rows], config, lm, tokenizer)
    texts = [tokenizer.decode(example["input_ids"], skip_special_tokens=True) for example in examples]
    assert texts == ["Judge: bad", "Judge it: bad"]
    with pytest.raises(
        ConfigError, match=r"data\.template fails on row 2 of train_dataset: 'input' is undefined; its columns"
    ):
        read([rows[0], {"instruction": "Judge", "completion": "x"}], config, lm, tokenizer)
    with pytest.raises(ConfigError, match=r"data\.template is not a Jinja template"):
        read(rows, CompletionsConfig(template="{{ instruction"), lm, tokenizer)


def test_a_template_reaches_no_python(lm, tokenizer):
    config = CompletionsConfig(template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(
        ConfigError, match=r"data\.template fails on row 1 of train_dataset: access to attribute '__class__'"
    ):
        read(ROWS, config, lm, tokenizer)


def test_rows_that_are_too_long(lm, tokenizer):
    longest = max(len(x["input_ids"]) for x in read(ROWS, CompletionsConfig(), lm, tokenizer)[0])
    with pytest.raises(ConfigError, match=rf"row 2 of train_dataset has {longest} tokens; at most {longest - 1} fit"):
        read(ROWS, CompletionsConfig(max_length=longest - 1), lm, tokenizer)
    examples, dropped = read(ROWS, CompletionsConfig(max_length=longest - 1, overlong="drop"), lm, tokenizer)
    assert (len(examples), dropped) == (1, 1)
    with pytest.raises(ConfigError, match="all 2 rows are longer"):
        read(ROWS, CompletionsConfig(max_length=2, overlong="drop"), lm, tokenizer)
    # The start of the prompt goes first; one token of it stays, and then the end of the completion goes.
    whole = read(ROWS, CompletionsConfig(), lm, tokenizer)[0][1]
    cut = read(ROWS, CompletionsConfig(max_length=longest - 1, overlong="truncate"), lm, tokenizer)[0][1]
    assert cut == {name: values[1:] for name, values in whole.items()}
    (_, short), _ = read(ROWS, CompletionsConfig(max_length=3, overlong="truncate"), lm, tokenizer)
    begin = ids(tokenizer, " a great joy.")[:2]
    assert short["input_ids"] == [ids(tokenizer, "I thought it was")[-1], *begin]
    assert short["labels"] == [-100, *begin]


def test_pairs_share_their_prompt(lm, tokenizer):
    config = DPOPairsConfig()
    encoder = Encoder(config, lm, tokenizer)
    rows = [{"prompt": "The film is", "chosen": " bad.", "rejected": " great."}]
    found = read_rows(config, tokenizer, "chosen", config, rows)
    (example,), _ = examples_of(found, lambda row: encoder.with_pair(row, "chosen", "rejected"))
    assert example == {
        "prompt_ids": ids(tokenizer, "The film is"),
        "chosen_ids": [*ids(tokenizer, " bad."), tokenizer.eos_token_id],
        "rejected_ids": [*ids(tokenizer, " great."), tokenizer.eos_token_id],
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "train_dataset has no rows"),
        ([{"prompt": "a"}], "row 1 of train_dataset has no column 'completion'; beside the prompt it has none"),
        ([{"prompt": "a", "completion": 3}], "row 1 of train_dataset, column 'completion', is 3; it must be a text"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "row 2 of train_dataset, column 'completion', is None"),
        ([{"question": "a", "completion": "b"}], r"data\.column is 'prompt'; the columns of train_dataset are"),
        ([{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}], "the tokenizer has no chat template"),
    ],
)
def test_rows_that_cannot_be_used(rows, message, lm, tokenizer):
    with pytest.raises(ConfigError, match=message):
        read(rows, CompletionsConfig(), lm, tokenizer)


def test_a_data_set_is_needed(lm, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.dataset is missing; give a \.jsonl"):
        read(None, CompletionsConfig(), lm, tokenizer)


@pytest.mark.parametrize(("flag", "cut"), [("True", True), ("false", False), ("", False), (None, False), (True, True)])
def test_a_flag_from_a_csv_file_is_read_as_one(flag, cut, lm, tokenizer):
    (example,), _ = read([ROWS[0] | {"completion_truncated": flag}], CompletionsConfig(), lm, tokenizer)
    assert (example["input_ids"][-1] != tokenizer.eos_token_id) is cut
    with pytest.raises(ConfigError, match=r"column 'completion_truncated', is 'maybe'; it must be true or false"):
        read([ROWS[0] | {"completion_truncated": "maybe"}], CompletionsConfig(), lm, tokenizer)


def test_half_a_character_is_refused(lm, tokenizer):
    with pytest.raises(ConfigError, match="row 1 of train_dataset, column 'completion', is not text in Unicode"):
        read([{"prompt": "a", "completion": "b\ud800"}], CompletionsConfig(), lm, tokenizer)


def test_a_beginning_of_sequence_stays_when_a_prompt_is_cut(lm, tokenizer):
    config = CompletionsConfig(add_bos=True, max_length=5, overlong="truncate")
    (example,), _ = read([{"prompt": "I thought it was", "completion": " bad."}], config, lm, tokenizer)
    rest = ids(tokenizer, "I thought it was")
    end = [*ids(tokenizer, " bad."), tokenizer.eos_token_id]
    assert example["input_ids"] == [tokenizer.bos_token_id, *rest[len(rest) - (4 - len(end)) :], *end]
    config = CompletionsConfig(add_bos=True, max_length=2, overlong="truncate")
    (example,), _ = read([{"prompt": "I thought it was", "completion": " bad."}], config, lm, tokenizer)
    assert example == {"input_ids": [rest[-1], end[0]], "labels": [-100, end[0]]}, "there must be something to learn"


def test_the_last_message_of_a_conversation_is_its_completion(lm, tokenizer):
    chat = chatting(tokenizer)
    conversation = [{"role": "user", "content": "Good?"}, {"role": "assistant", "content": "Bad."}]
    (example,), _ = read([{"messages": conversation}], CompletionsConfig(column="messages"), lm, chat)
    learned = [token for token, label in zip(example["input_ids"], example["labels"], strict=True) if label != -100]
    assert chat.decode(example["input_ids"]) == f"user: Good?\nassistant: Bad.\n{chat.eos_token}"
    assert chat.decode(learned) == f" Bad.\n{chat.eos_token}"
    rows = [{"messages": conversation}, {"messages": conversation[:1]}]
    with pytest.raises(
        ConfigError, match="row 2 of train_dataset, column 'messages', does not end with the assistant's"
    ):
        read(rows, CompletionsConfig(column="messages"), lm, chat)


def test_a_share_is_held_out_by_the_seed():
    examples = [{"n": i} for i in range(20)]
    of_rows = [RowsSettings(held_out=share).held_out_of(20) for share in (0.25, 0.0, 0.001, 0.99)]
    assert of_rows == [5, 0, 1, 20]
    train, held = split(examples, 5, seed=1)
    assert (len(train), len(held)) == (15, 5)
    assert sorted(x["n"] for x in (*train, *held)) == list(range(20))
    assert split(examples, 5, seed=1) == (train, held)
    assert split(examples, 5, seed=2) != (train, held)
    assert split(examples, 0, seed=1) == (examples, [])
    with pytest.raises(ConfigError, match=r"data\.held_out leaves none of 20 rows"):
        split(examples, 20, seed=1)


def chatting(tokenizer):
    """The tokenizer with a chat template."""
    chat = deepcopy(tokenizer)
    chat.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return chat


def test_a_truncated_answer_has_neither_an_end_nor_what_the_template_adds(lm, tokenizer):
    chat, question = chatting(tokenizer), [{"role": "user", "content": "Good?"}]
    rows = [{"prompt": question, "completion": "Bad and", "completion_truncated": True}]
    (example,), _ = read(rows, CompletionsConfig(), lm, chat)
    assert chat.decode(example["input_ids"]) == "user: Good?\nassistant: Bad and"


def test_a_prefill_is_continued_by_a_text_and_included_in_a_message(lm, tokenizer):
    from tokencredit.text.offline.examples import scored_pair
    from tokencredit.text.rewards.reward_models import RewardModel

    chat = chatting(tokenizer)
    prompt = [{"role": "user", "content": "Good?"}, {"role": "assistant", "content": "It is"}]
    whole = [{"role": "assistant", "content": "It is bad."}]
    both = [{"prompt": prompt, "completion": x, "other": x} for x in (" bad.", whole)]
    examples, _ = read(both, CompletionsConfig(), lm, chat)
    assert examples[0] == examples[1]
    assert chat.decode(examples[0]["input_ids"]).startswith("user: Good?\nassistant: It is bad.")
    torch.manual_seed(0)
    config = deepcopy(lm.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    scorer = RewardModel("it", model, chat)
    found = read_rows(CompletionsConfig(), chat, "completion", CompletionsConfig(), both)
    pairs = [scored_pair(scorer, row, "completion", "other")["chosen_ids"] for row in found]
    assert pairs[0] == pairs[1]
    assert "It is bad." in chat.decode(pairs[0])
    with pytest.raises(
        ConfigError, match="row 1 of train_dataset: its message does not begin with the prompt's prefilled one"
    ):
        read([{"prompt": prompt, "completion": [whole[0] | {"content": "No."}]}], CompletionsConfig(), lm, chat)


def test_a_template_writes_no_null_and_keeps_its_last_line_break(lm, tokenizer):
    config = CompletionsConfig(template="{{ a }}:\n")
    (example,), _ = read([{"a": "The", "completion": "bad"}], config, lm, tokenizer)
    assert tokenizer.decode(example["input_ids"], skip_special_tokens=True) == "The:\nbad"
    with pytest.raises(
        ConfigError, match=r"data\.template fails on row 1 of train_dataset: it writes a column that is null"
    ):
        read([{"a": None, "completion": "bad"}], config, lm, tokenizer)


def paired(rows, lm, tokenizer):
    """Texts of prompt, chosen and rejected of each row."""
    config = DPOPairsConfig()
    encoder = Encoder(config, lm, tokenizer)
    found = read_rows(config, tokenizer, "chosen", config, rows)
    examples, _ = examples_of(found, lambda row: encoder.with_pair(row, "chosen", "rejected"))
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [tuple(tokenizer.decode(x[name], skip_special_tokens=True) for name in names) for x in examples]


def test_a_prompt_inside_chosen_and_rejected_is_taken_out(lm, tokenizer):
    chat = chatting(tokenizer)
    whole = {"chosen": "The film is a great joy.", "rejected": "The film is a bad one."}
    apart = {"prompt": "The film is a", "chosen": " great joy.", "rejected": " bad one."}
    assert paired([whole], lm, tokenizer) == paired([apart], lm, tokenizer)
    question = [{"role": "user", "content": "How is it?"}]
    good, bad = ([{"role": "assistant", "content": text}] for text in ("Great.", "Bad."))
    rows = [{"chosen": question + good, "rejected": question + bad}]
    expected = paired([{"prompt": question, "chosen": good, "rejected": bad}], lm, chat)
    assert paired(rows, lm, chat) == expected
    for prompt in ("How is it?", " How is it?\n", 17):  # as UltraFeedback has it, with blanks, and a number of the row
        assert paired([rows[0] | {"prompt": prompt}], lm, chat) == expected
    # Equal ones, and one that goes on where the other ends, part before their last common word.
    for end in ("", ", I think."):
        pairs = [{"chosen": f"It is bad{end}", "rejected": "It is bad"}]
        apart = [{"prompt": "It is", "chosen": f" bad{end}", "rejected": " bad"}]
        assert paired(pairs, lm, tokenizer) == paired(apart, lm, tokenizer)
    # A prompt that holds more than both begin with stays whole.
    system = [{"role": "system", "content": "Be brief."}, *question]
    expected = paired([{"prompt": system, "chosen": good, "rejected": bad}], lm, chat)
    assert expected[0][0] == "system: Be brief.\nuser: How is it?\nassistant:"
    assert paired([rows[0] | {"prompt": system}], lm, chat) == expected
    whole_pair = {"chosen": system + good, "rejected": system + bad}
    assert paired([whole_pair | {"prompt": question}, whole_pair | {"prompt": None}], lm, chat) == expected * 2
    for prompt in ("Why?", system[:1]):
        with pytest.raises(
            ConfigError, match="row 2 of train_dataset: its chosen and rejected begin with other messages than"
        ):
            paired([rows[0] | {"prompt": question}, rows[0] | {"prompt": prompt}], lm, chat)
    with pytest.raises(ConfigError, match="row 1 of train_dataset has no prompt: its chosen and rejected must be"):
        paired([{"rejected": "A bad one."}, whole], lm, chat)
    for chosen in ("A great joy.", 3, good):
        with pytest.raises(ConfigError, match="row 2 of train_dataset has no prompt: its chosen and rejected must be"):
            paired([whole, {"chosen": chosen, "rejected": "The film is bad."}], lm, chat)


def test_only_a_reward_model_reads_pairs_without_a_prompt(tokenizer):
    rows = [{"prompt": "", "chosen": "Great.", "rejected": "Bad."}]
    for data in (rows, [*rows, rows[0] | {"prompt": "It is"}]):
        found = list(read_rows(PairsConfig(), tokenizer, "chosen", PairsConfig(), data))
        assert [row.ids for row in found] == [ids(tokenizer, row["prompt"]) for row in data]
    with pytest.raises(
        ConfigError, match=r"row 1 of train_dataset is '', which has no token; write a text or set data\.add_bos"
    ):
        list(read_rows(DPOPairsConfig(), tokenizer, "chosen", DPOPairsConfig(), rows))


def test_conversations_are_found_under_their_usual_names(lm, tokenizer):
    chat = chatting(tokenizer)
    messages = [{"role": "user", "content": "How is it?"}, {"role": "assistant", "content": "Great."}]
    shared = [{"from": "human", "value": "How is it?"}, {"from": "gpt", "value": "Great."}]
    expected = read([{"prompt": messages}], CompletionsConfig(), lm, chat)
    for row in ({"messages": messages}, {"conversations": messages}, {"conversations": shared}):
        assert read([row], CompletionsConfig(), lm, chat) == expected


def test_other_public_forms_are_answered_with_their_flags(lm, tokenizer):
    asked = {"instruction": "Judge", "input": "it", "output": " bad"}
    with pytest.raises(ConfigError, match=r"set --data\.template '.*' --data\.completion output") as told:
        read([asked], CompletionsConfig(), lm, tokenizer)
    config = CompletionsConfig(template=str(told.value).split("'")[3], completion="output")
    own = CompletionsConfig(template=LLAMA_FACTORY.fixed["prompts.template"], completion="output")
    rows = [asked, {"instruction": "Judge", "output": " bad"}, asked | {"input": None}]
    for template, texts in ((config, ["Judge it:", "Judge:", "Judge:"]), (own, ["Judge\nit", "Judge", "Judge"])):
        examples, _ = read(rows, template, lm, tokenizer, "output")
        decoded = [tokenizer.decode(x["input_ids"], skip_special_tokens=True) for x in examples]
        assert decoded == [f"{text} bad" for text in texts]
    with pytest.raises(ConfigError, match=r"set --data\.template '' --data\.completion text --data\.add_bos true"):
        read([{"text": "The film is bad."}], CompletionsConfig(), lm, tokenizer)
    config = CompletionsConfig(template="", completion="text", add_bos=True)
    [example] = read([{"text": "The film is bad."}], config, lm, tokenizer, "text")[0]
    assert tokenizer.decode(example["input_ids"], skip_special_tokens=True) == "The film is bad."
