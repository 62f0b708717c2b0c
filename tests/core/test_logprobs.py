import torch

from tokencredit.core.logprobs import token_logprobs


def test_equals_the_full_logits():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator)
    weight = torch.randn(11, 8, generator=generator)
    targets = torch.randint(0, 11, (2, 5), generator=generator)
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / 0.7)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=3, entropy=True)
    torch.testing.assert_close(logprobs, distribution.log_prob(targets))
    torch.testing.assert_close(entropy, distribution.entropy())
