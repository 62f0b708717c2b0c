"""Draws lambda_credit.svg: the same rollout, its credit under five values of λ.

Run `python docs/figures/lambda_credit.py`; it needs matplotlib. The critic's values are invented for the picture; the
advantages are computed from them by `tokencredit.core.advantages.gae`.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from tokencredit.core.advantages import gae

# The reward is how positive the review reads, at its last token: 0.9. The critic expects 0.5, is put off by "slow", and
# sees from "but" on where this is going.
STORY = [
    ("The", 0.50),
    ("first", 0.50),
    ("half", 0.48),
    ("is", 0.47),
    ("slow", 0.48),
    (",", 0.22),
    ("but", 0.22),
    ("the", 0.45),
    ("ending", 0.50),
    ("is", 0.58),
    ("worth", 0.60),
    ("every", 0.84),
    ("minute", 0.86),
    (".", 0.90),
]
REWARD = 0.9
LAMBDAS = [0.0, 0.5, 0.9, 0.95, 1.0]
GAIN, LOSS, CRITIC = "#2b6cb0", "#c05621", "#4a5568"


def draw() -> plt.Figure:
    """The critic's values on top, then the advantages under each λ."""
    tokens, values = [token for token, _ in STORY], [value for _, value in STORY]
    rewards = torch.zeros(1, len(STORY))
    rewards[0, -1] = REWARD
    figure, axes = plt.subplots(
        1 + len(LAMBDAS),
        1,
        figsize=(10, 9),
        sharex=True,
        height_ratios=[1.5, *[1] * len(LAMBDAS)],
        layout="constrained",
    )
    steps = range(len(STORY))
    top = axes[0]
    top.plot(steps, values, color=CRITIC, marker="o", markersize=4, label="critic's value before the token")
    top.scatter([len(STORY) - 1], [REWARD], color=GAIN, marker="*", s=130, zorder=3, label="reward, for the last token")
    top.set_ylim(0, 1.1)
    top.set_ylabel("value")
    top.legend(loc="lower right", frameon=False)
    for axis, lam in zip(axes[1:], LAMBDAS, strict=True):
        advantages = gae(rewards, torch.tensor([values]), gamma=1.0, lam=lam)[0][0].tolist()
        axis.bar(steps, advantages, color=[GAIN if a >= 0 else LOSS for a in advantages], width=0.7)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set_ylim(-0.35, 0.75)
        axis.set_ylabel(f"λ = {lam:g}")
    axes[1].set_title("advantage of each token, γ = 1", fontsize=10, loc="left")
    axes[-1].set_xticks(steps, tokens, fontsize=10)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", length=0)
    return figure


def main() -> None:
    """Write the picture beside this file."""
    plt.rcParams["svg.hashsalt"] = "lambda_credit"  # the same file every time
    draw().savefig(Path(__file__).with_suffix(".svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
