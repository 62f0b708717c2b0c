import json
from copy import deepcopy
from dataclasses import replace

import pytest
from datasets import Dataset, DatasetDict
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from helpers.models import with_chat_template
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.turns.chat.framing import TextFraming

QUESTION = [{"role": "user", "content": "How was the film?"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if polite %} Well,{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tokenizer):
    """A tokenizer with a chat template, which writes the beginning-of-sequence token by itself."""
    chatty = deepcopy(tokenizer)
    chatty.chat_template = TEMPLATE
    return chatty


def order(prompts, first, size, repeat=1):
    return prompts.batch(first, size, repeat).columns["number"]


def numbered(size):
    return [{"prompt": f"This movie {i}", "number": i} for i in range(size)]


def test_texts_stand_in_turn(tokenizer):
    prompts = Prompts(["One", "Two words", "Three words here"], tokenizer)
    assert prompts.batch(0, 4).prompts == ["One", "Two words", "Three words here", "One"]
    assert prompts.batch(4, 2).texts == ["Two words", "Three words here"]
    assert prompts.batch(1, 4, repeat=2).prompts == ["One", "Two words", "Two words", "Three words here"]
    assert prompts.batch(0, 4).columns == {}


def test_padding_is_on_the_left_and_masked(tokenizer):
    batch = Prompts(["One", "This movie was really"], tokenizer).batch(0, 2)
    for text, row, kept in zip(batch.texts, batch.ids, batch.mask, strict=True):
        assert tokenizer.decode(row[kept]) == text
        assert kept.tolist() == sorted(kept.tolist())
    assert batch.mask.all(0).any(), "the batch is as wide as its longest prompt"


def test_the_beginning_of_sequence_token_is_an_option(tokenizer):
    def ids(text, **options):
        return Prompts(text, tokenizer, PromptsConfig(**options)).batch(0, 1).ids[0].tolist()

    plain = ids("This movie")
    assert ids("This movie", add_bos=True) == [tokenizer.bos_token_id, *plain]
    assert ids(tokenizer.bos_token + "This movie", add_bos=True) == [tokenizer.bos_token_id, *plain]
    assert ids("This movie", add_bos=False) == plain


def test_other_columns_come_along(tokenizer):
    rows = [{"prompt": "One", "answer": 1}, {"prompt": "Two", "answer": 2, "note": {"by": "hand"}}]
    batch = Prompts(rows, tokenizer).batch(0, 4, repeat=2)
    assert batch.columns == {"answer": [1, 1, 2, 2], "note": [None, None, {"by": "hand"}, {"by": "hand"}]}


def test_each_pass_has_an_order_of_its_own(tokenizer):
    prompts = Prompts(numbered(50), tokenizer, seed=3)
    passes = [order(prompts, 50 * epoch, 50) for epoch in range(3)]
    assert all(sorted(numbers) == list(range(50)) for numbers in passes)
    assert len({tuple(numbers) for numbers in passes}) == 3
    assert order(Prompts(numbered(50), tokenizer, seed=4), 0, 50) != passes[0]


def test_the_order_depends_on_the_position_alone(tokenizer):
    """So a run that goes on, and a process that takes its share, see what one process without a pause sees."""
    whole = order(Prompts(Dataset.from_list(numbered(7)), tokenizer, seed=3), 0, 60, repeat=2)
    shares = [order(Prompts(numbered(7), tokenizer, seed=3), first, 10, repeat=2) for first in range(0, 60, 10)]
    assert whole == [number for share in shares for number in share]


def test_conversations_go_through_the_chat_template(chatty):
    rows = [{"prompt": QUESTION}, {"prompt": [*QUESTION, {"role": "assistant", "content": "It was"}]}]
    batch = Prompts(rows, chatty).batch(0, 2)
    assert batch.prompts == [row["prompt"] for row in rows]
    assert batch.texts[0] == f"{chatty.bos_token}[user] How was the film?\n[assistant]"
    assert batch.texts[1].endswith("[assistant] It was"), "an answer that was begun is continued"
    assert ((batch.ids == chatty.bos_token_id) & batch.mask).sum(1).tolist() == [1, 1]
    polite = Prompts(rows[:1], chatty, PromptsConfig(chat_template_kwargs={"polite": True}, add_bos=True)).batch(0, 1)
    assert polite.texts[0].endswith("[assistant] Well,")
    assert (polite.ids == chatty.bos_token_id).sum() == 1


def test_an_answer_that_was_begun_is_one_message_with_its_completion(chatty):
    """As in TRL: the reward sees one assistant's turn, the prefill and what was sampled, and a prompt without it."""
    begun = {"role": "assistant", "content": "It was", "name": "Ann"}
    rows = [{"prompt": QUESTION}, {"prompt": [*QUESTION, begun]}]
    batch = Prompts(rows, chatty).batch(0, 2)
    assert batch.questions() == [QUESTION, QUESTION]
    assert batch.answers([" fine", " good"]) == [
        [{"role": "assistant", "content": " fine"}],
        [{"role": "assistant", "content": "It was good", "name": "Ann"}],
    ]
    assert batch.continued([" fine", " good"])[1].endswith("[user] How was the film?\n[assistant] It was good")
    assert batch.prompts[1] == [*QUESTION, begun], "the data is left as it is"
    texts = Prompts(["One"], chatty).batch(0, 1)
    assert (texts.questions(), texts.answers([" two"])) == (["One"], [" two"])


def test_a_table_adds_nothing_to_messages(chatty):
    named = [{"role": "user", "content": "How?", "name": "Ann"}]
    rows = Dataset.from_list([{"prompt": QUESTION}, {"prompt": named}])
    assert Prompts(rows, chatty).batch(0, 2).prompts == [QUESTION, named]


def test_a_prompt_that_is_too_long_is_refused_dropped_or_truncated(tokenizer):
    rows = [{"prompt": text} for text in ("A film", "This movie was really not what I had expected", "The end")]
    with pytest.raises(
        ConfigError, match=r"row 2 of 'x' has \d+ tokens; at most 4 fit, by .*; shorten it, or set prompts"
    ):
        Prompts(rows, tokenizer, PromptsConfig(max_length=4), name="'x'")
    drop = PromptsConfig(max_length=4, overlong="drop")
    dropped = Prompts(rows, tokenizer, drop)
    assert dropped.batch(0, 3).prompts == ["A film", "The end", "A film"]
    with pytest.raises(ConfigError, match=r"all 1 prompts of 'x' have more than the 4 tokens that fit"):
        Prompts(rows[1:2], tokenizer, drop, name="'x'")

    cut = Prompts(rows, tokenizer, PromptsConfig(max_length=4, overlong="truncate")).batch(1, 1)
    assert cut.ids[0].tolist() == tokenizer(rows[1]["prompt"])["input_ids"][-4:]
    assert cut.texts[0] == tokenizer.decode(cut.ids[0])
    assert cut.prompts == [rows[1]["prompt"]]
    cut = Prompts(rows, tokenizer, PromptsConfig(max_length=4, overlong="truncate", add_bos=True)).batch(1, 1)
    assert cut.ids[0].tolist() == [tokenizer.bos_token_id, *tokenizer(rows[1]["prompt"])["input_ids"][-3:]]


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_limit_is_exact(tokenizer, add_bos):
    text = "This movie was really not what I had expected 🎬"
    config = PromptsConfig(add_bos=add_bos)
    length = Prompts(text, tokenizer, config).batch(0, 1).ids.shape[1]
    assert Prompts(text, tokenizer, replace(config, max_length=length)).batch(0, 1).mask.all()
    assert Prompts(text, tokenizer, config, limit=length).batch(0, 1).mask.all()
    with pytest.raises(ConfigError, match=rf"prompts\.text\[0\] has {length} tokens; at most {length - 1} fit, .*;"):
        Prompts(text, tokenizer, replace(config, max_length=length - 1))


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"prompts\.text\[1\] is '', which has no token"):
        Prompts(["A", ""], tokenizer)
    assert Prompts("", tokenizer, PromptsConfig(add_bos=True)).batch(0, 1).ids.tolist() == [[tokenizer.bos_token_id]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, r"row 2 of 'x' is 7; it must be a text, as the first row is"),
        (QUESTION, r"row 2 of 'x' is \[\{'role'.*; it must be a text"),
        ("half \ud83c", r"row 2 of 'x' holds '\\ud83c', a lone surrogate"),
    ],
)
def test_a_prompt_that_is_no_text_is_refused_by_row(tokenizer, prompt, message):
    with pytest.raises(ConfigError, match=message):
        Prompts([{"prompt": "A"}, {"prompt": prompt}], tokenizer, name="'x'")


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_token_id_that_the_tokenizer_lacks_is_refused_by_row(tokenizer, wrong):
    rows = [{"prompt": [5, 6]}, {"prompt": [5, wrong]}]
    with pytest.raises(
        ConfigError, match=rf"row 2 of 'x' has the token id {wrong}, which is none of the \d+ of the mod"
    ):
        Prompts(rows, tokenizer, name="'x'")


@pytest.mark.parametrize("prompt", [["a", "b"], [], QUESTION[0], 7])
def test_a_first_prompt_of_no_format_is_told_both(tokenizer, prompt):
    with pytest.raises(ConfigError, match=r"row 1 of 'x' is .*; it must be a text or a conversation, a list of mess"):
        Prompts([{"prompt": prompt}], tokenizer, name="'x'")


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_a_conversation_written_out_as_a_text_is_refused(chatty, write):
    with pytest.raises(ConfigError, match=r"row 1 of 'x' is a conversation written out as a text, .*list of messages"):
        Prompts([{"prompt": write(QUESTION)}], chatty, name="'x'")
    assert Prompts([{"prompt": "[{ is JSON"}], chatty).batch(0, 1).texts == ["[{ is JSON"]


def test_a_message_that_the_chat_template_leaves_out_is_found(chatty):
    blocks = deepcopy(chatty)
    blocks.chat_template = "{% for m in messages %}{% for x in m.content %}{{ x.text }}{% endfor %}{% endfor %}Answer:"
    assert Prompts([{"prompt": QUESTION}], blocks).lost_message() == "How was the film?"
    assert Prompts([{"prompt": QUESTION}], chatty).lost_message() == Prompts("A text", chatty).lost_message() == ""


@pytest.mark.parametrize("prompt", ["text", [], [{"content": "no role"}]])
def test_a_prompt_that_is_no_conversation_is_refused_by_row(chatty, prompt):
    with pytest.raises(ConfigError, match=r"row 2 of 'x' is .*; it must be a conversation, .*as the first row is"):
        Prompts([{"prompt": QUESTION}, {"prompt": prompt}], chatty, name="'x'")


@pytest.mark.parametrize(
    ("failure", "reason"), [("raise_exception('no system role')", "no system role"), ("1 // 0", "integer division")]
)
def test_a_template_that_refuses_a_conversation_is_named_by_row(failure, reason, chatty):
    strict = deepcopy(chatty)
    strict.chat_template = f"{{% if messages[0]['role'] == 'system' %}}{{{{ {failure} }}}}{{% endif %}}hello"
    with pytest.raises(ConfigError, match=rf"row 2 of 'x': the tokenizer's chat template rejects it: {reason}"):
        Prompts([{"prompt": QUESTION}, {"prompt": [{"role": "system", "content": ""}]}], strict, name="'x'")


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer):
    message = r"prompts of 'x' are conversations, but the tokenizer has no chat template; .* give plain texts"
    for keys, by in (
        ("prompts", r" \(of rows by prompts\.template\)"),
        ("data", r" \(of rows by data\.template\)"),
        ("", ""),
    ):
        with pytest.raises(ConfigError, match=f"{message}{by}$"):
            Prompts([{"prompt": QUESTION}], tokenizer, name="'x'", keys=keys)


def test_a_column_that_is_not_there_is_refused_with_those_that_are(tokenizer):
    for rows in (numbered(2), Dataset.from_list(numbered(2))):
        with pytest.raises(ConfigError, match=r"prompts\.column is 'text'; the columns of 'x' are prompt, number"):
            Prompts(rows, tokenizer, PromptsConfig(column="text"), name="'x'")


def test_an_empty_data_set_is_refused(tokenizer):
    for rows in ([], Dataset.from_list([])):
        with pytest.raises(ConfigError, match=r"'x' has no rows"):
            Prompts(rows, tokenizer, name="'x'")


def test_a_tokenizer_without_the_token_to_add_is_refused(tokenizer):
    bare = deepcopy(tokenizer)
    bare.bos_token = None
    with pytest.raises(ConfigError, match=r"prompts\.add_bos is true, but the tokenizer has no beginning-of-sequence"):
        Prompts("This", bare, PromptsConfig(add_bos=True))


def test_the_configuration_is_followed(tokenizer, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f'{{"question": "Word {i}", "number": {i}}}\n' for i in range(20)))
    config = PromptsConfig(dataset=str(file), column="question")
    shuffled = order(load_prompts(config, tokenizer, seed=1, limit=None), 0, 20)
    assert shuffled != list(range(20)) == sorted(shuffled)
    assert order(load_prompts(config, tokenizer, seed=2, limit=None), 0, 20) != shuffled
    config.shuffle = False
    assert order(load_prompts(config, tokenizer, seed=1, limit=None), 0, 20) == list(range(20))

    texts = PromptsConfig(text=[f"Word {i}" for i in range(20)])
    assert load_prompts(texts, tokenizer, seed=1, limit=None).batch(0, 20).texts == texts.text
    texts.shuffle = True
    assert load_prompts(texts, tokenizer, seed=1, limit=None).batch(0, 20).texts != texts.text


def test_a_template_is_for_rows_and_texts_stay_as_they_are(tokenizer):
    config = PromptsConfig(template="{{ question }} was")
    held_out = load_prompts(replace(config, text="A film"), tokenizer, seed=1, limit=None, group="eval")
    rows = load_prompts(config, tokenizer, seed=1, limit=None, dataset=[{"question": "It"}])
    assert held_out.batch(0, 1).texts + rows.batch(0, 1).texts == ["A film", "It was"]


def test_dropped_prompts_are_reported(tokenizer):
    config = PromptsConfig(text=["A", "This movie was really not what I had expected"], overlong="drop", max_length=4)
    note = load_prompts(config, tokenizer, seed=1, limit=9).dropped()
    assert note == "1 of the 2 prompts of prompts.text have more than 4 tokens and are dropped"
    assert load_prompts(PromptsConfig(), tokenizer, seed=1, limit=None).dropped() is None


def test_messages_name_the_group_that_asks(tokenizer):
    config = PromptsConfig(text=["A", "This movie was really not what I had expected"], max_length=4)
    with pytest.raises(ConfigError, match=r"^eval\.text\[1\] has .* set prompts\.overlong to drop"):
        load_prompts(config, tokenizer, seed=1, limit=None, group="eval")


def test_data_sets_from_python(tokenizer):
    config = PromptsConfig()
    for rows in (numbered(5), Dataset.from_list(numbered(5))):
        prompts = load_prompts(config, tokenizer, seed=1, limit=None, dataset=rows)
        assert sorted(order(prompts, 0, 5)) == list(range(5))
    data = Dataset.from_list(numbered(5))
    for wrong, kind in ((DatasetDict(train=data), "DatasetDict"), (data.to_iterable_dataset(), "IterableDataset")):
        with pytest.raises(ConfigError, match=rf"train_dataset is of type {kind}; it must be a datasets\.Dataset"):
            load_prompts(config, tokenizer, seed=1, limit=None, dataset=wrong)


def test_formats_change_nothing_and_transforms_apply(tokenizer):
    data = Dataset.from_list(numbered(3))
    for kind in ("torch", "pandas"):
        prompts = load_prompts(PromptsConfig(), tokenizer, seed=1, limit=None, dataset=data.with_format(kind))
        assert sorted(order(prompts, 0, 3)) == [0, 1, 2]
    marked = data.with_transform(
        lambda rows: rows | {"prompt": [f"{p}: {n}" for p, n in zip(rows["prompt"], rows["number"], strict=True)]}
    )
    assert Prompts(marked, tokenizer).batch(0, 1).texts == ["This movie 0: 0"]


def test_a_prefill_ends_as_the_model_reads_it(chatty):
    """A template may trim the space at its end; the model then writes the space by itself."""
    strict = deepcopy(chatty)
    strict.chat_template = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")
    rows = [{"prompt": [*QUESTION, {"role": "assistant", "content": "It was "}]}]
    for tokenizer, end, completion in ((strict, "It was", " good"), (chatty, "It was ", "good")):
        batch = Prompts(rows, tokenizer).batch(0, 1)
        assert batch.texts[0].endswith(end)
        assert batch.answers([completion])[0][0]["content"] == "It was good"


def with_ends(tokenizer):
    """A tokenizer that adds a beginning and an end to every text, as Llama's with add_eos_token and T5's do."""
    made = deepcopy(tokenizer)
    bos, eos = made.bos_token, made.eos_token
    made.backend_tokenizer.post_processor = TemplateProcessing(
        f"{bos} $A {eos}", special_tokens=[(bos, made.bos_token_id), (eos, made.eos_token_id)]
    )
    return made


def test_a_prompt_does_not_end_with_the_end_that_a_tokenizer_adds_and_begins_once(tokenizer):
    ends, plain = with_ends(tokenizer), tokenizer("This movie", add_special_tokens=False)["input_ids"]
    assert ends("This movie")["input_ids"] == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    for text in ("This movie", f"{tokenizer.bos_token}This movie"):
        assert Prompts(text, ends).batch(0, 1).ids.tolist() == [[tokenizer.bos_token_id, *plain]]
        assert TextFraming(ends).prompt(text)[1] == [tokenizer.bos_token_id, *plain]
    own = f"This movie{tokenizer.eos_token}"  # an end that the user wrote stays
    assert Prompts(own, ends).batch(0, 1).ids[0, -1] == tokenizer.eos_token_id


def test_a_prompt_that_grows_by_normalization_is_dropped(tokenizer):
    grows = deepcopy(tokenizer)
    grows.backend_tokenizer.normalizer = NFC()
    text = "\u0958" * 38  # 3 bytes each, 6 when normalized
    length = len(grows(text, add_special_tokens=False)["input_ids"])
    assert length > len(text.encode())
    config = PromptsConfig(max_length=length - 1, overlong="drop")
    prompts = Prompts(["This movie", text], grows, config)
    assert prompts.kept.tolist() == [0]
    with pytest.raises(ConfigError, match=rf"has {length} tokens; at most {length - 1} fit"):
        Prompts(["This movie", text], grows, replace(config, overlong="error"))


def test_text_blocks_are_joined_and_other_contents_refused(chatty):
    def rendered(content):
        return Prompts([{"prompt": [{"role": "user", "content": content}]}], chatty).batch(0, 1).texts[0]

    blocks = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert rendered(blocks) == rendered("Hi there")
    with pytest.raises(ConfigError, match=r"\[0\]: a message of the role user has no content"):
        rendered(None)
    for content in (3, {"text": "Hi"}, [{"type": "image", "image": "x.png"}], ["Hi"]):
        with pytest.raises(ConfigError, match=r"it must be a text, or a list of text blocks"):
            rendered(content)


def test_arguments_of_tool_calls_may_be_json_texts(chatty):
    chatty.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )

    def rendered(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "Hi"}]
        return Prompts([{"prompt": messages}], chatty).batch(0, 1).texts[0]

    assert rendered('{"word": "rain"}') == rendered({"word": "rain"}) == '{"word": "rain"}Hi'
    assert rendered("not JSON") == '"not JSON"Hi'


def test_a_role_makes_each_plain_text_a_message_and_needs_a_chat_template(tmp_path):
    """Rewards get conversations then, as from a data set of conversations."""
    tokenizer = AutoTokenizer.from_pretrained(with_chat_template(tmp_path))
    config = PromptsConfig(role="user")
    batch = Prompts(["Good?", "Bad?"], tokenizer, config).batch(0, 2)
    assert batch.texts == ["user: Good?\nassistant:", "user: Bad?\nassistant:"]
    assert batch.answers(["Yes", "No"])[1] == [{"role": "assistant", "content": "No"}]
    with pytest.raises(ConfigError, match=r"role is user, and prompts\.text holds no texts; leave it out"):
        Prompts([{"prompt": [{"role": "user", "content": "a"}]}], tokenizer, config)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"prompts\.role is user, but the tokenizer has no chat template"):
        Prompts(["a"], tokenizer, config)
    with pytest.raises(
        ConfigError, match=r"data\.chat_template_kwargs is {'x': 1}, but the tokenizer has no chat templ"
    ):
        Prompts(["a"], tokenizer, PromptsConfig(chat_template_kwargs={"x": 1}), keys="data")
