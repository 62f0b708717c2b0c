"""Small language models with random weights, and comparisons of weights."""

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}

# Torch and Transformers are imported where they are needed, because conftest.py imports this module, and so does the
# process that hands tests to the workers of pytest-xdist.


def loud(model, std=0.3):
    """Draw all matrices anew, with a larger deviation: the usual one makes all texts alike."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=std)
    return model


def random_lm(family, tokenizer, **config):
    """A loud language model of a family, the same at each call, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": None}
    config = AutoConfig.for_model(family, **{"vocab_size": len(tokenizer)} | ids | config)
    return loud(AutoModelForCausalLM.from_config(config).eval())


TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def with_chat_template(folder):
    """Make the folder of the built-in model with a chat template, and return it."""
    from transformers import AutoTokenizer

    from tokencredit.text.models.model_loading import resolve

    origin = resolve("builtin:reviews", "policy")
    tokenizer = AutoTokenizer.from_pretrained(origin)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / file).symlink_to(f"{origin}/{file}")
    return folder


def copy_weights(module):
    """A copy of a module's parameters, by name."""
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def changed_weights(module, before):
    """The names of the parameters that differ from a copy."""
    import torch

    return {name for name, x in module.named_parameters() if not torch.equal(x, before[name])}
