"""Reward short reviews: complete sentences within a word limit."""

PRICE_OF_A_WORD = 0.1


def few_words(prompts, completions, limit, **columns):
    """1 for a complete sentence within `limit` words, less per extra word; 0 for a truncated completion."""
    rewards = []
    for completion in completions:
        excess = max(0, len(completion.split()) - limit)
        ended = completion.rstrip().endswith((".", "!", "?"))
        rewards.append(max(0.0, 1 - PRICE_OF_A_WORD * excess) if ended else 0.0)
    return rewards
