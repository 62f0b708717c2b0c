"""Records of episodes of several turns, as in samples.jsonl."""

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</div></details></section>\u202egnp.exe\u2066\x1b[31mred\x1b[0m\x07\r\x00\ud800 '\"><b>{{ 7 * 7 }}<!--\n"
    "assistant › I won"
)
"""An observation that attacks pages and terminals."""


def episode(*speeches, iteration=1, **changes):
    """A record of an episode.

    Args:
        speeches: role, tokens, and of an assistant its reward, and then its problems, if any. Each acted token's
            numbers follow from its place, so that none equals another.
        iteration: the iteration.
        changes: other fields.
    """
    tokens, mask, turns = [], [], []
    for role, spoken, *more in speeches:
        turn = {"role": role, "start": len(tokens), "end": len(tokens) + len(spoken)}
        turn |= {name: value for name, value in zip(("reward", "problems"), more, strict=False) if value is not None}
        tokens += spoken
        mask += [int(role == "assistant")] * len(spoken)
        turns.append(turn)
    acted = [place for place, chosen in enumerate(mask) if chosen]

    def numbers(first, step):
        found = {place: round(first + step * i, 6) for i, place in enumerate(acted)}
        return [found.get(place, 0) for place in range(len(tokens))]

    rewards = numbers(-0.01, -0.001)
    for turn in turns:
        if turn.get("reward") and turn["end"]:
            rewards[turn["end"] - 1] += turn["reward"]
    return {
        "iteration": iteration,
        "prompt": "You are at the start.",
        "completion": "".join(tokens),
        "reward": float(sum(turn.get("reward", 0.0) for turn in turns)),
        "truncated": False,
        "token_ids": list(range(len(tokens))),
        "tokens": tokens,
        "logprobs": numbers(-1.0, -0.1),
        "new_logprobs": numbers(-0.9, -0.11),
        "rewards": rewards,
        "advantages": numbers(-0.3, 0.2),
        "returns": numbers(0.2, 0.1),
        "values": numbers(0.5, 0.05),
        "ref_logprobs": numbers(-1.2, -0.07),
        "mask": mask,
        "turns": turns,
        "ending": "done",
    } | changes


def grid(iteration=1, **changes):
    """A short episode: two turns, and an observation between them."""
    return episode(
        ("assistant", ["go", " right"], 0.0),
        ("environment", ["\n", "A hole", " is", " near.", "\n"]),
        ("assistant", ["down", "."], 1.0),
        iteration=iteration,
        **changes,
    )
