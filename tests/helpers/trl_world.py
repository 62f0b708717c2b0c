"""An environment, a tool and a reward function that write down how they are called; the program plays them in TRL.

`python trl_world.py FOLDER` trains for one step in TRL's GRPOTrainer, with a policy that makes the calls of `CALLS` and
then answers, and prints what was written down as JSON. FOLDER holds a tokenizer.
"""

import json
import sys
from pathlib import Path

SEEN = []
CALLS = [("zeta", {"x": 3}), ("look", {"q": "sky"}), ("middle", {}), ("listed", {}), ("alpha", {})]
ROWS = [
    {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": f"Question {n}."}], "n": n}
    for n in (0, 1)
]


class World:
    """An environment in TRL's form."""

    def reset(self, **row):
        SEEN.append(["reset", row])
        self.n, self.count = row["n"], 0
        return " Think."

    def zeta(self, x: int) -> int:
        """
        Count.

        Args:
            x: by how much
        """
        self.count += x
        return self.count

    async def alpha(self) -> str:
        """Say a."""
        return "a"

    def listed(self) -> dict:
        """Say what there is."""
        return {"count": self.count, "none": None}

    @staticmethod
    def middle() -> float:
        """Say a number."""
        return 0.5

    @classmethod
    def no_tool(cls): ...

    @property
    def broken(self):
        raise ValueError("not to be read")

    def _hidden(self): ...

    def get_reward(self) -> float:
        SEEN.append(["get_reward", self.n, self.count])
        return float(self.n)


def look(q: str) -> str:
    """
    Look.

    Args:
        q: at what
    """
    return q.upper()


def scored(prompts, completions, environments, n, **columns):
    answers = [[m for m in messages if m["role"] == "tool"] for messages in completions]
    SEEN.append(["scored", prompts, answers, [type(e).__name__ for e in environments], n])
    return [0.0] * len(prompts)


def main(folder):
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|pad|>"})
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))
    settings = trl.GRPOConfig(
        f"{folder}/out",
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=2000,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        shuffle_dataset=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model,
        [scored],
        settings,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        tools=[look],
        environment_factory=World,
    )
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in CALLS]
    turns = ["\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + "<|im_end|>", "Done.<|im_end|>"]
    sampled = iter([tokenizer(turn)["input_ids"] for turn in turns])

    def generate(prompt_ids, *arguments, **options):
        turn = next(sampled)
        return [turn] * len(prompt_ids), None

    trainer._generate_single_turn = generate
    trainer.train()
    tools = [tool.__name__ for tool in trainer._env_tools[None]]
    rewards = [trainer.reward_func_names, trainer.reward_weights.tolist()]
    print("SEEN", json.dumps({"tools": tools, "rewards": rewards, "seen": SEEN}))


if __name__ == "__main__":
    main(sys.argv[1])
