"""Train from Python without the packages and modules that training does not need: `python tests/bare.py FOLDER`.

They are hidden from imports and from `importlib.util.find_spec`, as if they were not installed.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

MISSING = ["datasets", "gymnasium", "matplotlib", "pandas", "plotly", "pyarrow", "scipy", "tensorboard", "tensorflow"]
MISSING += ["tensorboardX", "fcntl"]  # Windows has no fcntl
ROWS = [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}]


class Hiding(PathFinder):
    """Finds everything on `sys.path` but the missing packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in MISSING else super().find_spec(fullname, path, target)


def byte_tokenizer():
    """One token per byte, made in memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>")


def small_model(tokenizer):
    """A GPT-2 with the same random weights each time."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **shape))


def vowels(completions, **columns):
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


def refusal(function, *arguments, **options):
    """The message of the `ConfigError` that a call raises."""
    import tokencredit as tc

    try:
        function(*arguments, **options)
    except tc.ConfigError as error:
        return str(error)
    raise AssertionError(f"{function} raised no ConfigError")


def main(folder: Path) -> None:
    import tokencredit as tc

    tokenizer = byte_tokenizer()

    def train(name, iterations, resume=False, rows=ROWS, trackers=None, lora=0, **prompts):
        config = tc.PPOConfig(
            model=tc.ModelConfig(dtype="float32", lora=tc.LoraConfig(rank=lora) if lora else tc.LoraConfig()),
            prompts=tc.PromptsConfig(**prompts),
            rollout=tc.RolloutConfig(batch_size=8, max_new_tokens=4),
            ppo=tc.UpdateConfig(epochs=1, minibatches=1),
            eval=tc.EvalConfig(every=1, max_new_tokens=4),
            run=tc.RunConfig(iterations=iterations, dir=str(folder / name), trackers=trackers),
        )
        model, held_out = small_model(tokenizer), ROWS[:2]
        trainer = tc.PPOTrainer(model, vowels, config, rows, held_out, processing_class=tokenizer)
        return trainer.train(resume_from_checkpoint=resume)

    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert train("run", 1, rows=None, dataset=str(file))["iterations"] == 1
    assert train("run", 2, resume=True, rows=None, dataset=str(file))["iterations"] == 2
    assert train("japanese", 1, rows=None, text="\u6620\u753b\u306f", lora=2)["iterations"] == 1
    for which in ("policy", "best"):
        policy = tc.load(folder / "run", which)
        assert len(policy.generate("one", n=2)) == len(policy.values(" two", "one")) - 2 == 2
    assert len(tc.read_run(folder / "run").metrics) == 2

    (folder / "prompts.parquet").write_bytes(b"")
    assert tc.PPOConfig.from_dict({"kl.coef": 0.1}).kl.coef == 0.1
    print(refusal(train, "no", 1, rows=None, dataset=str(folder / "prompts.parquet")))
    print(refusal(train, "no", 1, rows=None, dataset="someone/prompts"))
    print(refusal(train, "no", 1, trackers=["tensorboard"]))
    print(refusal(train, "no", 1, rows=("one", "two")))
    print(refusal(tc.compare, [folder / "run", folder / "japanese"]))
    print(refusal(lambda: tc.ControlTrainer))
    assert not (folder / "no").exists()
    assert not {name.partition(".")[0] for name in sys.modules} & set(MISSING)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
    main(Path(sys.argv[1]))
