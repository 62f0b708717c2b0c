"""Made-up transcripts, and the same transcript token by token: in one rendering, and turn by turn."""

import json

from helpers.chat_templates import MODELS
from tokencredit.text.turns.chat.chat_template import look_up

WORDS = [
    *["rain", "the", "Yes.", "3 + 4 = 7", "한국어", "café", "😀", "a\nb", "two  spaces", "\ttab", '"quoted"', "\\"],
    *["{}", "<b>", "user", "assistant\n", "\n\n", "[/", "</", "don't", "e\u0301", "\u200b", "0.5", "[1, 2]"],
]


def roll(sides: int) -> int:
    """Roll a die.

    Args:
        sides: Number of sides.
    """
    return sides


TOOLS = [look_up, roll]


def words(rng, most=8):
    """A text, which may begin or end with white space."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def made_calls(rng, number):
    """Calls as a model's message holds them."""
    made = []
    for index in range(number):
        arguments = {"sides": rng.randint(1, 10**6)}
        if rng.random() < 0.6:
            word = " ".join(rng.choices(["rain", "café", "한", '"q"', "it's"], k=3))
            arguments = {"word": word, "limit": rng.randint(-3, 99)}
        name = "look_up" if "word" in arguments else "roll"
        made.append({"type": "function", "id": f"call{index:05d}", "function": {"name": name, "arguments": arguments}})
    return made


def as_rendered(name, calls):
    """Calls as the template takes them: DeepSeek's wants arguments as texts."""
    if name != "DeepSeek-V3":
        return calls
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]


def transcript(name, rng):
    """Messages up to an observation, and the tools of the prompt.

    Turns of text are answered by users, turns of calls by tools. Mistral moves the tools to the last user message, and
    Qwen3 forgets the thinking before it: their tool loops have one.
    """
    model = MODELS[name]
    calls = model.tools and rng.random() < 0.7
    one_user = calls and name in ("Mistral", "Qwen3")
    messages = [{"role": "system", "content": words(rng)}] if model.system and rng.random() < 0.4 else []
    messages.append({"role": "user", "content": words(rng)})
    for _ in range(rng.randint(1, 6)):
        if calls and (one_user or rng.random() < 0.7):
            made = made_calls(rng, rng.randint(1, 3) if model.several else 1)
            messages.append({"role": "assistant", "content": "", "tool_calls": as_rendered(name, made)})
            if model.thinks and rng.random() < 0.5:
                messages[-1]["reasoning_content"] = words(rng).strip()
            for call in made:
                answer = {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"]}
                messages.append({**answer, "content": words(rng)})
        else:
            text = words(rng).lstrip() or "Yes."
            # Transformers' mask ends with the first byte of a character, so a turn without an end ends in ASCII.
            messages.append({"role": "assistant", "content": text if model.ends else text + "."})
            messages.append({"role": "user", "content": words(rng)})
    return messages, TOOLS if calls else []


def reference(tokenizer, messages, tools, **kwargs):
    """Token ids and assistant mask of one rendering, by Transformers alone."""
    options = {"add_generation_prompt": True, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = tokenizer.apply_chat_template(messages, tools=tools or None, **options, **kwargs)
    return rendered["input_ids"], rendered["assistant_masks"]


def replay(framing, messages, tools, ids, mask, *, cut=lambda: False):
    """The transcript turn by turn; the sampled ids are the one rendering's own, `ids` with its `mask`.

    `cut` is true for a turn whose end-of-turn token is not sampled. Returns token ids, mask, the mask that is expected,
    and the turns with their messages.
    """
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    made = framing.prompt(messages[:first], tools)[1]
    acted, expected, turns, at = [0] * len(made), list(mask), [], first
    while at < len(messages):
        start = len(made)
        stop = next((i for i in range(start, len(ids)) if not mask[i]), len(ids))
        sampled = ids[start:stop]
        if cut() and len(sampled) > 1 and sampled[-1] == framing.encoder.protected.get(framing.end):
            sampled = sampled[:-1]
            expected[stop - 1] = 0
        turn = framing.parse(sampled, made, tools)
        following = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        between = framing.observation(messages[at + 1 : following], turn)
        made, acted = [*made, *sampled, *between], [*acted, *[1] * len(sampled), *[0] * len(between)]
        turns.append((turn, messages[at]))
        at = following
    return made, acted, expected, turns
