"""Build a run's prompts, reward terms, pipeline and learner from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, importing, quoted
from tokencredit.learn.state import trainable
from tokencredit.report.paper.card import model_card
from tokencredit.runs.folder import AUDIT
from tokencredit.runs.jsonl import is_number, read_object
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import OPEN_END, Summary, count, shortened
from tokencredit.settings.data import ClassifierTerm, DefaultReward, RewardTerm
from tokencredit.settings.fields import refuse_unused
from tokencredit.settings.parts import is_own, label_of
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig
from tokencredit.text.data.datasets import Rows, from_python, require_datasets
from tokencredit.text.data.hub import upload
from tokencredit.text.data.prefixes import origin_of_values, scoring
from tokencredit.text.data.prompts import Prompts, as_ids, load_prompts
from tokencredit.text.data.tasks import Tasks, load_tasks
from tokencredit.text.engines.building import build_engine
from tokencredit.text.engines.engine import Engine
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.models.peft_models import ADAPTER_CONFIG
from tokencredit.text.models.precision import weights_in
from tokencredit.text.models.run_models import Models
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.rewards import calls
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rewards.terms import as_settings, as_terms, build_terms
from tokencredit.text.rewards.texts import last_message
from tokencredit.text.sources.by_hand import NO_REWARD, HandedScores
from tokencredit.text.turns.environments import COLUMN, Environments, load_environments
from tokencredit.text.turns.play import EpisodePlayer, Framings
from tokencredit.user_code.parts import read_by_parts

OWN_COLUMNS = ("prompts", "completions", "prompt_ids", "completion_ids", "completion_mask", "ref_logprobs")
"""Arguments of reward functions that a run gives itself."""
TURN_COLUMNS = ("environments", "turn_rewards")
"""Those that it gives with several turns."""


def with_reward(args: PPOConfig, reward_funcs: Any) -> tuple[PPOConfig, Any]:
    """Settings with rewards that are names or terms of a configuration, which a run's folder then holds; the others."""
    if (terms := as_settings(reward_funcs)) is None:
        return args, reward_funcs
    return replace(args, reward=terms, python={k: x for k, x in args.python.items() if k != "reward_funcs"}), None


def check_arguments(
    args: PPOConfig, model: Any, processing_class: Any, peft_config: Any, train: Any, held_out: Any, played: bool
) -> None:
    """Raise `ConfigError` for an argument of `PPOTrainer` of the wrong type, or one that conflicts with a setting.

    `train` and `held_out` are the data sets; `played` is true if there are tools or an environment from Python.
    """
    if isinstance(model, nn.Module) and not hasattr(model, "config"):
        raise ConfigError(
            f"model is a {type(model).__name__}, a module without a Transformers configuration; give a hub id, a "
            "folder, or a model of Transformers or PEFT, as AutoModelForCausalLM loads it; to train your own, make it "
            "the trunk of a PreTrainedModel, which takes 12 lines (docs/python.md#your-own-model), or write the loop "
            "on tokencredit.core (docs/your-own.md#a-model-of-your-own)"
        )
    if not (model is None or isinstance(model, str | nn.Module)):
        raise ConfigError(
            f"model is {quoted(model)}; it must be a str, a hub id or folder, or a loaded model; settings go into args"
        )
    if not (processing_class is None or isinstance(processing_class, PreTrainedTokenizerBase)):
        raise ConfigError(f"processing_class is {quoted(processing_class)}; it must be a Transformers tokenizer")
    if peft_config is not None:
        check_peft_config(args, peft_config)
    if args.run.samples == "all":  # pyarrow comes with it
        require_datasets("run.samples: all")
    rows = {"train_dataset": (train, "prompts"), "eval_dataset": (held_out, "eval")}
    rows = {name: (dataset, group) for name, (dataset, group) in rows.items() if dataset is not None}
    for name, (dataset, group) in rows.items():
        from_python(dataset, name)
        for key in ("text", "dataset"):
            if getattr(getattr(args, group), key) is not None:
                raise ConfigError(f"{name} and {group}.{key} are both given; leave one of them out")
    if held_out is not None and not args.eval.every:
        raise ConfigError("eval_dataset is given, which has no effect without eval.every; leave it out")
    if played:
        args.check_turns()
    refuse_unused(args, [*rows] + ["environment_factory"] * played)


def check_peft_config(args: PPOConfig, peft_config: Any) -> None:
    """Raise `ConfigError` for an argument that is no PEFT configuration, or for a second adapter."""
    with importing("peft_config", "PEFT", "tokencredit[peft]"):
        from peft import PeftConfig
    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"peft_config is {quoted(peft_config)}; it must be PEFT's, such as peft.LoraConfig(…); "
            "Tokencredit's LoraConfig goes into args, as model.lora"
        )
    if args.model.lora.rank:
        raise ConfigError("peft_config and model.lora.rank are both given; leave one of them out")


def check_batch_size(args: PPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless each process has a prompt to sample and to evaluate."""
    rows, group = args.rollout.batch_size, args.rollout.per_prompt
    if rows // group < processes:
        raise ConfigError(
            f"rollout.batch_size is {rows}; it must be at least {processes * group}, {processes} processes times "
            f"rollout.per_prompt, {group}"
        )
    if args.eval.every:
        check_evaluation_size(args, processes)
    if is_own(args.critic.kind) and processes > 1:
        raise ConfigError(
            f"critic.kind {label_of(args.critic.kind)} is fitted in one process, and there are {processes}"
        )


def check_evaluation_size(args: PPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless each process has a prompt to evaluate."""
    if args.eval.samples < processes:
        raise ConfigError(f"eval.samples is {args.eval.samples}; it must be at least {processes}, one per process")


def environments_of(
    args: PPOConfig, factory: Any = None, functions: Sequence[Callable[..., Any]] | None = None
) -> Environments | None:
    """The environments and tools of a run, from its settings or from Python; None if a completion is one turn."""
    if not args.several_turns() and factory is None and not functions:
        return None
    return load_environments(args.env, args.tools, factory=factory, functions=functions)


def prepare_rows(
    args: PPOConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    environments: Environments | None,
    train: Rows | None,
    held_out: Rows | None,
) -> tuple[Prompts | Tasks, Prompts | Tasks]:
    """Load the prompts for training and for evaluation, which may be the same; with environments rows of episodes."""
    if environments is not None:
        return prepare_tasks(args, lm, environments, train, held_out)
    apart = args.held_out_prompts() is not None or held_out is not None
    longest = args.rollout.max_new_tokens
    if args.eval.every and not apart:
        longest = max(longest, args.evaluation_sampling().max_new_tokens)
    limit = max_prompt_length(lm, longest, args.ppo.micro_batch_tokens)
    prompts = load_prompts(args.prompts, tokenizer, seed=args.seed, limit=limit, dataset=train)
    return prompts, evaluation_prompts(args, lm, tokenizer, held_out) if apart else prompts


def evaluation_prompts(
    args: PPOConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: Rows | None = None
) -> Prompts:
    """Load the prompts for evaluation: held-out ones if configured, otherwise those of training."""
    held_out = args.held_out_prompts()
    return load_prompts(
        held_out or args.prompts,
        tokenizer,
        seed=args.seed,
        limit=max_prompt_length(lm, args.evaluation_sampling().max_new_tokens, args.ppo.micro_batch_tokens),
        dataset=dataset,
        group="prompts" if held_out is None and dataset is None else "eval",
        dataset_name="eval_dataset",
    )


def prepare_tasks(
    args: PPOConfig, lm: PreTrainedModel, environments: Environments, train: Rows | None, held_out: Rows | None
) -> tuple[Tasks, Tasks]:
    """The rows of episodes for training and for evaluation, whose episodes differ from those of training."""
    # Refuses settings with which no prompt fits beside an episode.
    for sampling in (args.rollout, args.evaluation_sampling()) if args.eval.every else (args.rollout,):
        max_prompt_length(lm, sampling.max_new_tokens, args.ppo.micro_batch_tokens)
    names = {"group": "prompts", "dataset_name": "train_dataset"}
    trained = load_tasks(args.prompts, seed=args.seed, stream=0, dataset=train, **names)
    own = train if args.held_out_prompts() is None else None
    tasks = trained, evaluation_tasks(args, own if held_out is None else held_out)
    if args.prompts.shuffle and all(rows.rows is None for rows in tasks):
        raise ConfigError("prompts.shuffle is true, and there are no rows to shuffle; leave it out")
    for rows in tasks if args.eval.every else tasks[:1]:
        environments.check_columns(rows.columns, rows.values(COLUMN))
    return tasks


def evaluation_tasks(args: PPOConfig, dataset: Rows | None = None) -> Tasks:
    """The rows of episodes for evaluation: held-out ones if configured, else those of training with other seeds."""
    held_out = args.held_out_prompts()
    group = "prompts" if held_out is None else "eval"
    return load_tasks(
        held_out or args.prompts, seed=args.seed, stream=1, dataset=dataset, group=group, dataset_name="eval_dataset"
    )


def next_steps(args: PPOConfig) -> dict[str, str]:
    """Commands and calls for a trained run, with their meaning."""
    prompt = " --prompt TEXT" if {"train_dataset", "environment_factory", "tools"} & set(args.python) else ""
    steps = {f"tokencredit generate RUN{prompt}": "completions of the trained policy"}
    if (args.run.save_every or args.python) and args.python.get("reward_funcs") != []:
        steps["trainer.audit()" if args.python else "tokencredit audit RUN"] = "audit of the credit"
    return steps


def check_terms(terms: list[Term], models: Models, prompts: Prompts | Tasks, held_out: Prompts | Tasks) -> None:
    """Raise `ConfigError` if a reward function needs an argument that no completion of these prompts has."""
    own = [name for name in OWN_COLUMNS if name != "ref_logprobs" or models.reference is not None]
    for rows, source in ((prompts, calls.TRAINING), (held_out, "eval.dataset (eval_dataset in Python)")):
        calls.check_columns(terms, [*own, *TURN_COLUMNS * isinstance(rows, Tasks), *rows.other_columns], source)


def default_prompts(args: PPOConfig, rows: Prompts | Tasks) -> bool:
    """True for the prompt that a run without any has; a loop by hand gives its own."""
    return isinstance(rows, Prompts) and rows.name == "prompts.text" and args.prompts.text is None


def remarks(args: PPOConfig, rows: Prompts | Tasks, *, sharded: bool, by_hand: bool = False) -> Iterator[str]:
    """Lines for the user on settings and columns that do something other than their names suggest."""
    own = OWN_COLUMNS + TURN_COLUMNS * isinstance(rows, Tasks)
    for name in [name for name in rows.other_columns if name in own]:
        yield f"the column {name!r} of {rows.name} does not reach rewards, which get the run's own {name}; rename it"
    plain = isinstance(rows, Prompts) and not rows.conversational and bool(rows.tokenizer.chat_template)
    plain = plain and not (by_hand and default_prompts(args, rows))
    if plain and isinstance(rows, Prompts) and as_ids(rows.rows[0].get(rows.column)) is None:
        yield (
            f"{rows.name} holds plain texts, so the model's chat template is not used, and it continues them as they "
            "stand; for a chat model set prompts.role: user, or give conversations, [{role: user, content: …}]"
        )
    if isinstance(rows, Prompts) and (text := rows.lost_message()):
        yield f"the chat template leaves out the message {text!r:.60} of the first prompt: the policy does not read it"
    if args.run.shard == "full" and not sharded:
        yield "run.shard full: one process, which holds the models whole"
    if args.ppo.loss == "gspo" and args.ppo.reduction != "sequence":
        reduction = f"ppo.loss gspo with ppo.reduction {args.ppo.reduction}"
        yield f"{reduction}: longer completions weigh more than in GSPO's paper, which has ppo.reduction: sequence"


READS_REWARD = (("eval", "every"), ("audit", "every"), ("critic", "pretrain"))
"""Settings that score completions which no loop by hand has seen."""


def load_terms(
    args: PPOConfig, reward_funcs: Any, device: torch.device, environments: Environments | None = None
) -> list[Term]:
    """Load the reward terms: `reward_funcs` or else those of the configuration, and the environment's own."""
    own = [] if environments is None else environments.terms()
    if isinstance(reward_funcs, list | tuple) and not reward_funcs and not own:
        if given := [f"{group}.{key}" for group, key in READS_REWARD if getattr(getattr(args, group), key)]:
            raise ConfigError(f"{' and '.join(given)} needs a reward, and {NO_REWARD}; leave it out")
        return [Term("scores", 1.0, HandedScores(), retries=0)]
    if reward_funcs is not None:
        terms = as_terms(reward_funcs, device)
    elif environments is not None and any(isinstance(term, DefaultReward) for term in args.reward):
        terms = []  # the default, which is for texts; the environment is from Python
    else:
        terms = _configured_terms(args, device)
    if not terms and not own:
        raise ConfigError("there is no reward: reward is empty, and no environment has its own; give a term")
    if same := {term.name for term in terms} & {term.name for term in own}:
        raise ConfigError(f"a reward term is named {', '.join(same)}, the name of the environment's own; rename it")
    return own + terms


def _configured_terms(args: PPOConfig, device: torch.device) -> list[Term]:
    for number, term in enumerate(args.reward if args.advantage.bootstrap else ()):
        kind, source = term.source()
        if kind != "function" or ":" not in source:  # user functions are checked at the first batch
            raise ConfigError(
                f"advantage.bootstrap is True, and reward[{number}] ({kind} {source!r}) scores whole completions; the "
                "score of a truncated one would count twice: give functions that return one number per token"
            )
    return build_terms(args.reward, device)


def build_pipeline(
    args: PPOConfig,
    models: Models,
    terms: list[Term],
    processes: Processes,
    environments: Environments | None = None,
    report: Callable[[str], None] = print,
    prefix_every: int = 0,
) -> Pipeline:
    """Build a run's pipeline; `report` is called with a line for each event, `prefix_every` is as in `Pipeline`."""
    engine = build_engine(args, models, processes, report)
    return Pipeline(
        models.policy,
        models.reference,
        models.tokenizer,
        models.precision,
        engine,
        terms,
        args.kl,
        processes,
        args.ppo.micro_batch_tokens,
        None if environments is None else build_player(args, engine, environments),
        prefix_every,
        "entropy" in read_by_parts(args),
    )


def write_card(args: PPOConfig, pipeline: Pipeline, record: RunRecord, summary: Summary, reported: set[str]) -> None:
    """Write the model card of a run's policy, with its last evaluation and its audit."""
    if not record.main:
        return
    run = record.folder.path
    folder, audit = run / record.run_kind.saved, run / AUDIT
    adapter = folder / ADAPTER_CONFIG
    base = read_object(adapter, adapter.read_bytes())["base_model_name_or_path"] if adapter.is_file() else ""
    evaluations = [row for row in record.history[record.history.evaluated :] if is_number(row.get("eval/reward"))]
    last = evaluations[-1] if evaluations else {}
    card = model_card(
        args,
        [term.name for term in pipeline.terms],
        summary,
        None if pipeline.player is None else pipeline.player.environments.name,
        handed=[name for name in ("prompts", "completions") if name in reported],
        name=args.run.push_to_hub or str(folder),
        base=str(base),
        adapter=adapter.is_file(),
        evaluation={name: x for name, x in last.items() if name.startswith("eval/") and x is not None},
        audit=read_object(audit, audit.read_bytes())["metrics"] if audit.is_file() else {},
    )
    record.folder.write(f"{folder.name}/README.md", card)


def upload_policy(args: RunConfig, record: RunRecord, stopped_by: str) -> None:
    """Upload the policy to `run.push_to_hub`, if the run is at its end."""
    if args.push_to_hub is None or not record.main:
        return
    if stopped_by == "iterations" or stopped_by.startswith("stop."):
        upload(record.folder.path / "policy", args.push_to_hub)
    else:
        record.screen.say(f"not uploaded to {args.push_to_hub}: the run is not at its end")


def build_player(args: PPOConfig, engine: Engine, environments: Environments) -> EpisodePlayer:
    """Build the player of episodes of several turns."""
    framings = Framings(engine.tokenizer, environments, args.prompts, engine.end_ids)
    room = partial(max_prompt_length, engine.policy.lm, budget=args.ppo.micro_batch_tokens)
    return EpisodePlayer(engine, framings, environments, args.env, room)


OUTPUTS = {"probability": "P({})", "logit": "logit of {}", "log_odds": "log-odds of {}"}
"""Classifier outputs, with a place for the label."""


def overview(
    args: PPOConfig, pipeline: Pipeline, prompts: Prompts | Tasks, configured: bool, folder: Path
) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a text; reward terms that are not `configured` but from Python are shown by their names."""
    lm, precision, processes = pipeline.policy.lm, pipeline.precision, pipeline.processes
    size, trained = weights_in(lm.parameters()), sum(p.numel() for p in trainable(lm))
    name = args.model.name or "from Python"
    yield "model", f"{name}, {count(size)} parameters" + (f", {count(trained)} trained" if trained < size else "")
    number, handed = len(prompts.kept), any(isinstance(x.function, HandedScores) for x in pipeline.terms)
    if isinstance(prompts, Tasks):
        assert pipeline.player is not None
        rows = "" if prompts.rows is None else f", {number:,} rows of {prompts.name}"
        yield "environment", f"{pipeline.player.environments.name}, at most {args.env.max_turns} turns{rows}"
    elif not (default_prompts(args, prompts) and handed):
        first = shortened(last_message(prompts.batch(0, 1).prompts[0]), 60)
        yield "prompts", f"1: {first}" if number == 1 else f"{number:,} of {prompts.name}; the first: {first}"
    by_source = configured and not isinstance(prompts, Tasks)
    terms = [(x.weight, source(x)) for x in args.reward] if by_source else [(x.weight, x.name) for x in pipeline.terms]
    for weight, term in terms:
        yield "reward", term if weight == 1 else f"{weight:g} × {term}"
    if args.critic.ours and isinstance(prompts, Prompts) and not handed:
        yield "values", origin_of_values(args, scoring(pipeline.terms), lm, prompts, pipeline.prefix_every)
    gpu = f" ({torch.cuda.get_device_name(precision.device)})" if precision.device.type == "cuda" else ""
    jobs = f", {processes.count} processes" if processes.count > 1 else ""
    yield "device", f"{precision.device}{gpu}, {precision.dtype}{jobs}"
    number = args.run.iterations
    iterations = f"{number:,} iterations" if number < OPEN_END else "iterations"
    yield "run", f"{folder}, {iterations} of {args.rollout.batch_size:,} completions"


def source(settings: RewardTerm) -> str:
    """A reward term's source, such as `P(NEGATIVE) of builtin:reviews`."""
    if isinstance(settings, ClassifierTerm):
        return f"{OUTPUTS[settings.output].format(settings.label)} of {settings.classifier}"
    kind, value = settings.source()
    return value if kind == "function" else f"reward model {value}"
