"""A review in few words: whole sentences, and no more words than asked for."""

PRICE_OF_A_WORD = 0.1


def few_words(prompts, completions, limit, **columns):
    """1 for a completion that ends its sentence within `limit` words, less for every word more, 0 for a cut-off one."""
    rewards = []
    for completion in completions:
        excess = max(0, len(completion.split()) - limit)
        ended = completion.rstrip().endswith((".", "!", "?"))
        rewards.append(max(0.0, 1 - PRICE_OF_A_WORD * excess) if ended else 0.0)
    return rewards
