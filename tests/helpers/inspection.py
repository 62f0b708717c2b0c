"""Contents of an inspect.json, with made-up numbers that fit each other."""

import math
import random

TEXT = ["The", " film", " was", " long", ",", " and", " the", " ending", " felt", " bad", "."]


def inspection(tokens=TEXT, prompt_length=7, asked=8, layers=2, heads=3, critic=True, seed=0):
    """What training changed, as the command writes it: sums and shares are those of their parts."""
    draw = random.Random(seed)
    components = attribution(draw, layers, heads)
    parts = [row for row in components if row["kind"] != "head" and not (row["kind"] == "bias" and row["layer"])]
    total = {key: sum(row[key] for row in parts) for key in ("base", "tuned", "difference")}
    patched = patching(draw, components, total)
    added = {row["name"]: row for row in components}
    unknown = {"base": None, "tuned": None}  # of the unembedding
    top = [
        unknown | added.get(row["name"], {}) | row for row in sorted(patched, key=lambda row: -abs(row["share"]))[:5]
    ]
    positions, prompt = list(range(prompt_length - 1, len(tokens) - 1)), list(range(prompt_length))
    names = ["embedding", *map(str, range(1, layers + 1))]
    return {
        "run": "reviews",
        "base": "builtin:reviews",
        "tuned": "runs/reviews/policy",
        "prompt": "".join(tokens[:prompt_length]),
        "completion": "".join(tokens[prompt_length:]),
        "seed": 1,
        "seconds": 12.3,
        "model": {"layers": layers, "heads": heads, "width": 32, "family": "gpt2", "parameters": 123_456},
        "tokens": list(tokens),
        "prompt_length": prompt_length,
        "question": {
            "up": [" bad", " awful"],
            "down": [" good"],
            "source": "the tokens that moved most",
            "base": total["base"],
            "tuned": total["tuned"],
            "change": total["difference"],
            "position": asked,
        },
        "answer": {
            "sentence": f"{top[0]['name']} carries {top[0]['share']:.0%} of the change.",
            "top": [
                {key: row[key] for key in ("name", "share", "base", "tuned")} | {"others": [0.1, None, 0.6, 0.2]}
                for row in top
            ],
        },
        "lens": {
            "layers": names,
            "positions": positions,
            "base": lens(draw, names, positions, tokens),
            "tuned": lens(draw, names, positions, tokens),
            "kl": [[draw.random() * i for _ in positions] for i in range(len(names))],
        },
        "attribution": {
            "target": "log-odds of the question",
            "components": components,
            "total": total,
            "error": {"base": 1e-6, "tuned": 2e-6},
            "norm": "the last norm's scale is that of the whole",
        },
        "patching": {
            "metric": "log-odds of the question",
            "components": patched,
            "top_five": {
                "names": [row["name"] for row in top],
                "patched": total["base"] + 0.9 * total["difference"],
                "share": 0.9,
            },
        },
        "attention": {
            "from": asked,
            "to": prompt,
            "heads": [
                {"layer": i, "head": j, "base": weights(draw, prompt), "tuned": weights(draw, prompt)}
                for i in range(1, layers + 1)
                for j in range(1, heads + 1)
            ],
            "input_gradient": {model: [draw.gauss(0, 1) for _ in prompt] for model in ("base", "tuned")},
        },
        "critic": values(draw, names, range(len(tokens))) if critic else None,
        "weights": {
            "modules": [
                {"name": row["name"], "relative_norm": draw.random() / 10, "effective_rank": 7.5, "parameters": 4096}
                for row in parts
            ],
            "tokens_up": [
                {"token": " bad", "base": 0.0123, "tuned": 0.61},
                {"token": " dull", "base": 0, "tuned": 0.2},
            ],
            "tokens_down": [{"token": " good", "base": 0.5, "tuned": 0.004}],
        },
    }


def attribution(draw, layers, heads):
    """Components in the order of the model; an attention is the sum of its heads and its bias."""

    def row(name, kind, layer=None, head=None, size=0.5):
        base, tuned = draw.gauss(0, size), draw.gauss(0.3, size)
        numbers = {"base": base, "tuned": tuned, "difference": tuned - base}
        return {"name": name, "kind": kind, "layer": layer, "head": head, **numbers}

    rows = [row("embedding", "embedding")]
    for i in range(1, layers + 1):
        parts = [row(f"layer {i} head {j}", "head", i, j, size=0.3) for j in range(1, heads + 1)]
        parts.append(row(f"layer {i} attention bias", "bias", i, size=0.1))
        whole = {key: sum(part[key] for part in parts) for key in ("base", "tuned", "difference")}
        rows.append({"name": f"layer {i} attention", "kind": "attention", "layer": i, "head": None, **whole})
        rows += [*parts, row(f"layer {i} mlp", "mlp", i)]
    return [*rows, row("bias", "bias", size=0.1)]


def patching(draw, components, total):
    """Heads, MLPs and the unembedding, each with shares that follow from its log-odds."""
    rows, (base, tuned, change) = [], total.values()
    unembedding = {"name": "unembedding", "kind": "unembedding", "layer": None, "head": None}
    for row in [*components, unembedding]:
        if row["kind"] in ("head", "mlp", "unembedding"):
            patched, ablated = (end + draw.gauss(0, 0.5) * change for end in (base, tuned))
            numbers = {"patched": patched, "share": (patched - base) / change, "ablated": None, "ablated_share": None}
            if row is not unembedding:
                numbers |= {"ablated": ablated, "ablated_share": (tuned - ablated) / change}
            rows.append({key: row[key] for key in ("name", "kind", "layer", "head")} | numbers)
    return rows


def lens(draw, layers, positions, tokens):
    """Tokens, probabilities and ranks by layer and position."""
    table = [[draw.random() for _ in positions] for _ in layers]
    return {
        "token": [[draw.choice(tokens) for _ in positions] for _ in layers],
        "probability": table,
        "rank": [[1 + math.floor(100 * (1 - p)) for p in row] for row in table],
    }


def weights(draw, positions):
    """Attention weights that sum to less than 1."""
    numbers = [draw.expovariate(1) ** 2 for _ in positions]
    return [0.8 * number / sum(numbers) for number in numbers]


def values(draw, layers, positions):
    """The critic's values by layer and position."""
    table = [[draw.gauss(0, 1) for _ in positions] for _ in layers]
    note = "the value head was trained on layer 2, the last"
    return {"layers": layers, "values": table, "final": table[-1], "score": -0.7, "note": note}
