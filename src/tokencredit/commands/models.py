"""Commands that sample from models: `generate` and `evaluate`."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from tokencredit.commands.options import Seed
from tokencredit.errors import ConfigError
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parsing import Parser, new_command
from tokencredit.settings.run_file import read_config
from tokencredit.settings.text import PPOConfig


def generate_parser() -> Parser:
    """The parser of `tokencredit generate`."""
    parser = new_command("Sample completions from a trained policy.")
    parser.add_argument("run", help="Folder of a run.")
    parser.add_argument("--prompt", help="Prompt to complete; by default the run's prompts in turn.")
    parser.add_argument(
        "--chat", action="store_true", help="Format the prompt as a user message with the chat template."
    )
    parser.add_argument("-n", "--samples", type=PositiveInt, default=5, help="Number of completions.")
    parser.add_argument("--base", action="store_true", help="Sample from the model that the run started from.")
    parser.add_argument(
        "--max_new_tokens", type=PositiveInt | None, help="Longest completion, in tokens; by default the run's."
    )
    parser.add_argument("--temperature", type=PositiveFloat | None, help="Sampling temperature; by default the run's.")
    parser.add_argument("--seed", type=Seed, default=1, help="Seed of all randomness.")
    return parser


def generate(options: Namespace) -> None:
    """Run `tokencredit generate`."""
    if options.chat and not options.prompt:
        raise ConfigError("--chat needs --prompt, the user message")
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.policy import Policy

    disable_progress_bar()
    policy = Policy(Path(options.run), config, "base" if options.base else "policy", critic=False)
    longest = options.max_new_tokens or config.rollout.max_new_tokens
    prompts = policy.prompts(options.prompt, options.samples, longest, options.chat)
    for text in prompts.continued(policy.complete(prompts, longest, options.temperature, options.seed)):
        print(visible(text))


def evaluate_parser() -> Parser:
    """The parser of `tokencredit evaluate`."""
    parser = new_command("Evaluate a trained policy.")
    parser.add_argument("run", help="Folder of a run.")
    parser.add_argument("--base", action="store_true", help="Evaluate the model that the run started from.")
    parser.add_argument(
        "--best", action="store_true", help="Evaluate the policy with the best evaluation, instead of the last."
    )
    return parser


def evaluate(options: Namespace) -> None:
    """Run `tokencredit evaluate`."""
    config = read_config(Path(options.run) / "config.yaml", PPOConfig, options.no_code)
    from transformers.utils.logging import disable_progress_bar

    from tokencredit.text.evaluation import evaluate_run

    disable_progress_bar()
    evaluate_run(Path(options.run), config, "base" if options.base else "best" if options.best else "policy")
