import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tokencredit.core.logprobs import token_loss, token_stats
from tokencredit.core.vocab_projection import TokenStats

VOCABULARY, WIDTH, REF_WIDTH = 11, 6, 4


def make(seed, shape=(2, 5), dtype=torch.float64):
    """The policy's hidden states, weight and bias, the reference's, targets and a mask."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator, dtype=dtype)

    policy = [randn(*shape, WIDTH), randn(VOCABULARY, WIDTH), randn(VOCABULARY)]
    ref = (randn(*shape, REF_WIDTH), randn(VOCABULARY, REF_WIDTH), randn(VOCABULARY))
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    return policy, ref, targets, torch.rand(shape, generator=generator) < 0.7


def all_logits(hidden, weight, bias, temperature, softcap):
    logits = hidden @ weight.T + bias
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


def full(policy, ref, targets, mask, temperature, softcap):
    """Log-probability, entropy and KL by way of all logits, and plain autograd."""
    log_p, log_q = (all_logits(*head, temperature, softcap).log_softmax(-1) for head in (policy, ref))
    logprobs = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return [x * mask for x in (logprobs, -(log_p.exp() * log_p).sum(-1), (log_p.exp() * (log_p - log_q)).sum(-1))]


def test_log_probs_entropy_and_kl_by_hand():
    # Logits (log 1, log 2, log 5): probabilities ⅛, ¼, ⅝
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    logprobs, entropy, _ = token_stats(torch.tensor([[1.0], [1.0]]), weight, torch.tensor([1, 2]), entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([0.25, 0.625]).log())
    by_hand = -(0.125 * math.log(0.125) + 0.25 * math.log(0.25) + 0.625 * math.log(0.625))
    torch.testing.assert_close(entropy, torch.tensor([by_hand, by_hand]))
    # Temperature ½ squares what is not normalised: 1, 4, 25 of 30
    logprobs, *_ = token_stats(torch.tensor([[1.0]]), weight, torch.tensor([1]), temperature=0.5)
    torch.testing.assert_close(logprobs, torch.tensor([4 / 30]).log())
    # Against the uniform reference the KL is log 3 − H.
    kl = token_stats(torch.tensor([[1.0]]), weight, None, ref=(torch.tensor([[0.0]]), weight, None)).kl
    torch.testing.assert_close(kl, torch.tensor([math.log(3) - by_hand]))


settings_of_the_head = {
    "seed": st.integers(0, 2**32),
    "temperature": st.sampled_from([0.5, 1.0, 2.0]),
    "softcap": st.sampled_from([None, 2.0]),
    "chunk": st.sampled_from([1, 3, 512]),
    "dtype": st.sampled_from([torch.float64, torch.float32]),
}


@given(**settings_of_the_head)
def test_token_stats_equal_those_of_full_logits_with_gradients(seed, temperature, softcap, chunk, dtype):
    policy, ref, targets, mask = make(seed, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in policy]
    expected = full(leaves, ref, targets, mask, temperature, softcap)
    factors = torch.randn(3, *targets.shape, dtype=dtype)
    loss = sum((factor * x).sum() for factor, x in zip(factors, expected, strict=True))
    expected_gradients = torch.autograd.grad(loss, leaves)

    hidden, weight, bias = leaves
    options = {"temperature": temperature, "softcap": softcap, "chunk": chunk, "mask": mask}
    results = token_stats(hidden, weight, targets, bias=bias, ref=ref, entropy=True, **options)
    loss = sum((factor * x).sum() for factor, x in zip(factors, results, strict=True))
    assert_close((*results, *torch.autograd.grad(loss, leaves)), (*expected, *expected_gradients))


def assert_close(results, expected):
    for x, reference in zip(results, expected, strict=True):
        tolerance = 1e-9 if reference.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(x, reference, rtol=tolerance, atol=tolerance)


def assert_same_loss(leaves, targets, loss, expected, statistics, **options):
    """`token_loss` and three times its gradient are those of `expected`, a loss of all logits and their statistics."""
    hidden, weight, bias = leaves
    gradients = torch.autograd.grad(3 * expected, leaves, retain_graph=True)
    result, stats = token_loss(hidden, weight, targets, loss, bias=bias, entropy=True, **options)
    assert_close((result, *stats, *torch.autograd.grad(3 * result, leaves)), (expected, *statistics, *gradients))
    assert not any(x.requires_grad for x in stats)


def some_loss(old, weights):
    """As PPO's: a clipped ratio, an entropy bonus and a price of KL."""

    def loss(now, at):
        ratio = (now.logprobs - old[at]).exp()
        tokens = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) - 0.1 * now.entropy + 0.3 * now.kl
        return (tokens * weights[at]).sum()

    return loss


@given(**settings_of_the_head)
def test_a_loss_formed_at_once_is_that_of_full_logits_with_gradients(seed, temperature, softcap, chunk, dtype):
    policy, ref, targets, mask = make(seed, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in policy]
    logprobs, entropy, kl = full(leaves, ref, targets, mask, temperature, softcap)
    generator = torch.Generator().manual_seed(seed)
    old = logprobs.detach() + 0.3 * torch.randn(mask.shape, generator=generator, dtype=dtype)
    loss = some_loss(old[mask], torch.rand(mask.shape, generator=generator, dtype=dtype)[mask])
    expected = loss(TokenStats(logprobs[mask], entropy[mask], kl[mask]), slice(None))
    options = {"temperature": temperature, "softcap": softcap, "chunk": chunk, "mask": mask, "ref": ref}
    assert_same_loss(leaves, targets, loss, expected, (logprobs, entropy, kl), **options)


@pytest.mark.slow
@given(**settings_of_the_head)
def test_a_loss_on_a_support_is_that_of_the_renormalised_softmax(seed, temperature, softcap, chunk, dtype):
    policy, ref, targets, mask = make(seed, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in policy]
    generator = torch.Generator().manual_seed(seed)
    inside = torch.rand(*mask.shape, VOCABULARY, generator=generator) < 0.4
    order = inside.int().argsort(dim=-1, descending=True, stable=True)[..., :7]
    support = order.masked_fill(~inside.gather(-1, order), -1).int()
    inside = torch.zeros_like(inside).scatter(-1, torch.where(support < 0, targets.unsqueeze(-1), support.long()), True)
    inside.scatter_(-1, targets.unsqueeze(-1), True)  # the target counts as inside
    weights = torch.rand(int(mask.sum()), generator=generator, dtype=dtype)
    loss = some_loss(torch.zeros_like(weights), weights)

    logits = all_logits(*leaves, temperature, softcap)
    log_p = logits.masked_fill(~inside, -torch.inf).log_softmax(-1)
    finite = log_p.masked_fill(~inside, 0.0)  # 0 log 0 is 0
    log_q, p = all_logits(*ref, temperature, softcap).log_softmax(-1), log_p.exp()
    logprobs = finite.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    statistics = [x * mask for x in (logprobs, -(p * finite).sum(-1), (p * (finite - log_q)).sum(-1))]
    expected = loss(TokenStats(*(x[mask] for x in statistics)), slice(None))
    options = {"temperature": temperature, "softcap": softcap, "chunk": chunk, "mask": mask, "ref": ref}
    assert_same_loss(leaves, targets, loss, expected, statistics, support=support, **options)


def test_a_support_is_of_token_ids():
    (hidden, weight, _), _, targets, _ = make(0)
    short, floats = torch.zeros(2, 4, 3, dtype=torch.int64), torch.zeros(2, 5, 3)
    for support, message in ((short, r"support has shape \(2, 4, 3\)"), (floats, "support has dtype torch.float32")):
        with pytest.raises(ValueError, match=message):
            token_loss(hidden, weight, targets, lambda now, at: now.logprobs.sum(), support=support)


def test_a_loss_formed_at_once_projects_once():
    (hidden, weight, _), _, targets, _ = make(0)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
                products.append(function)
            return function(*args, **(kwargs or {}))

    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with Products():
        loss, _ = token_loss(*leaves, targets, lambda now, at: now.logprobs.sum())
        loss.backward()
    assert len(products) == 3, "logits, and the gradients of hidden states and weight"
    with pytest.raises(RuntimeError, match="can be taken once"):
        loss.backward()


@given(**settings_of_the_head)
def test_a_loss_that_joins_tokens_is_that_of_full_logits_with_gradients(seed, temperature, softcap, chunk, dtype):
    """Nonlinear in sums of log-probabilities over sequences, whose tokens fall into different chunks."""
    policy, ref, targets, mask = make(seed, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in policy]
    logprobs, entropy, kl = full(leaves, ref, targets, mask, temperature, softcap)

    def loss(now, at):
        assert at == slice(None) or len(now.logprobs) == mask.sum(), "all tokens at once"
        rows = torch.zeros(mask.shape, dtype=now.logprobs.dtype).masked_scatter(mask, now.logprobs)
        return rows.sum(-1).sigmoid().sum() + (0.1 * now.entropy - 0.3 * now.kl).tanh().sum()

    expected = loss(TokenStats(logprobs[mask], entropy[mask], kl[mask]), slice(None))
    options = {"temperature": temperature, "softcap": softcap, "chunk": chunk, "mask": mask, "ref": ref}
    assert_same_loss(leaves, targets, loss, expected, (logprobs, entropy, kl), additive=False, **options)


def test_a_loss_without_gradients_is_the_same():
    (hidden, weight, bias), ref, targets, mask = make(0)
    loss = some_loss(torch.zeros(mask.sum()), torch.ones(mask.sum()))
    options = {"bias": bias, "ref": ref, "mask": mask, "entropy": True}
    with_gradient, _ = token_loss(hidden.clone().requires_grad_(), weight, targets, loss, **options)
    with torch.no_grad():
        without, _ = token_loss(hidden, weight, targets, loss, **options)
    assert torch.equal(with_gradient, without)


def test_token_stats_computes_only_the_requested_statistics():
    (hidden, weight, _), ref, targets, _ = make(0)
    logprobs, entropy, _ = token_stats(hidden, weight, targets, temperature=1.0, entropy=True)
    assert torch.equal(token_stats(hidden, weight, targets).logprobs, logprobs)
    assert torch.equal(token_stats(hidden, weight, None, entropy=True).entropy, entropy)
    assert token_stats(hidden, weight, targets)[1] is None
    assert token_stats(hidden, weight, None)._asdict() == {"logprobs": None, "entropy": None, "kl": None}
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(token_stats(hidden, weight, targets)[0].sum(), hidden)
    assert gradient.shape == hidden.shape
    ref = [x.requires_grad_() for x in ref]
    token_stats(hidden, weight, None, ref=ref).kl.sum().backward()
    assert [x.grad for x in ref] == [None, None, None]
    with torch.inference_mode():
        token_stats(hidden, weight, targets, entropy=True)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), garbage=st.sampled_from([0.0, 1e30, math.inf, math.nan]))
@settings(max_examples=30)
def test_masked_tokens_do_not_change_statistics_or_gradients(seed, garbage):
    policy, ref, targets, mask = make(seed, dtype=torch.float32)
    results = []
    for content, target in ((0.0, 0), (garbage, -100)):
        hidden, ref_hidden = (torch.where(mask[..., None], x, content) for x in (policy[0], ref[0]))
        hidden, weight = hidden.requires_grad_(), policy[1].clone().requires_grad_()
        ids, other = torch.where(mask, targets, target), (ref_hidden, *ref[1:])
        stats = token_stats(hidden, weight, ids, ref=other, mask=mask, entropy=True)
        gradients = torch.autograd.grad(sum(x.sum() for x in stats), (hidden, weight))
        assert all((x[~mask] == 0).all() for x in (*stats, gradients[0]))
        results.append((*stats, *gradients))
    for clean, spoilt in zip(*results, strict=True):
        assert torch.equal(clean, spoilt)


class LargestTensor(TorchDispatchMode):
    """The most numbers of a tensor per dtype, without views of `known`."""

    def __init__(self, known=None):
        super().__init__()
        self.known, self.numel = None if known is None else known.untyped_storage().data_ptr(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.known:
                self.numel[x.dtype] = max(self.numel[x.dtype], x.numel())
        return results


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    tokens, vocabulary, chunk = 64, 1000, 8
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight, ref = torch.randn(vocabulary, 4, requires_grad=True), (torch.randn(tokens, 4), torch.randn(vocabulary, 4))
    with LargestTensor() as largest:
        targets = torch.zeros(tokens, dtype=torch.int64)
        stats = token_stats(hidden, weight, targets, ref=(*ref, None), chunk=chunk, entropy=True)
        sum(x.sum() for x in stats).backward()
    assert max(largest.numel.values()) == chunk * vocabulary


def test_half_precision():
    (hidden, weight, bias), ref, targets, _ = make(0)
    exact = token_stats(hidden, weight, targets, bias=bias, ref=ref, entropy=True)
    halves = [x.bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    half_ref = tuple(x.bfloat16() for x in ref)
    stats = token_stats(halves[0], halves[1], targets, bias=halves[2], ref=half_ref, entropy=True)
    sum(x.sum() for x in stats).backward()
    for x, expected in zip(stats, exact, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), expected, rtol=0.05, atol=0.1)
    assert all(x.grad.dtype == torch.bfloat16 for x in halves)


def test_autocast_is_the_same_forward_and_backward():
    (hidden, weight, bias), _, targets, _ = make(0, dtype=torch.float32)
    # Numbers of bfloat16: some processors round the operands, others do not.
    leaves = [x.bfloat16().float().requires_grad_() for x in (hidden, weight, bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, *_ = token_stats(leaves[0], leaves[1], targets, bias=leaves[2])
    logprobs.sum().backward()
    halves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    expected, *_ = token_stats(halves[0], halves[1], targets, bias=halves[2])
    expected.sum().backward()
    assert torch.equal(logprobs, expected)
    for leaf, half in zip(leaves, halves, strict=True):
        assert leaf.grad.dtype == torch.float32, "sums over tokens are not rounded to half precision"
        assert torch.equal(leaf.grad.bfloat16(), half.grad)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_logits_are_not_rounded_to_half_precision(autocast, half, device):
    """Those of 16 would be to multiples of 1/8 in bfloat16, and of 1/64 in float16."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=generator).to(half) for size in ((3, 5, 64), (5000, 64)))
    ref = (torch.randn(3, 5, 64, generator=generator).to(half), weight.flip(0), None)
    targets = torch.randint(5000, (3, 5), generator=generator)
    wide = [x.double() for x in (hidden, weight, *ref[:2])]
    assert (wide[0] @ wide[1].T).abs().max() > 16
    expected = token_stats(wide[0], wide[1], targets, ref=(wide[2], wide[3], None), entropy=True)
    given = [(x.float() if autocast else x).to(device) for x in (hidden, weight, *ref[:2])]
    with torch.autocast(device, dtype=half, enabled=autocast):
        stats = token_stats(given[0], given[1], targets.to(device), ref=(*given[2:], None), entropy=True)
        _, of_loss = token_loss(given[0], given[1], targets.to(device), lambda now, at: now.logprobs.sum())
    for x, exact in zip((*stats, of_loss.logprobs), (*expected, expected.logprobs), strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.cpu().double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_there_is_no_second_copy_of_the_weight(dtype):
    hidden, weight = torch.randn(4, 64), torch.randn(20_000, 64).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), LargestTensor(weight) as largest:
        token_loss(hidden, weight, torch.zeros(4, dtype=torch.int64), lambda now, at: now.logprobs.sum())
    assert largest.numel[torch.bfloat16] < weight.numel() / 2
    assert largest.numel[torch.float32] < weight.numel() / 2


def test_the_process_keeps_its_precision():
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    hidden, weight, targets = torch.randn(8, 64), torch.randn(500, 64), torch.zeros(8, dtype=torch.int64)

    def project(_):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return token_stats(hidden, weight, targets)[0]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(project, range(200)))
    assert matmul.fp32_precision == before


def test_large_logits_are_finite():
    hidden = torch.tensor([[1e4]])
    logprobs, entropy, _ = token_stats(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0]), entropy=True)
    assert logprobs.item() == entropy.item() == 0


HIDDEN, WEIGHT, TARGETS = torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((HIDDEN, WEIGHT[0], TARGETS), {}, "weight has shape"),
        ((HIDDEN[..., :3], WEIGHT, TARGETS), {}, "hidden has shape"),
        ((HIDDEN, WEIGHT, TARGETS[0]), {}, "targets has shape"),
        ((HIDDEN, WEIGHT, TARGETS.float()), {}, "targets has dtype"),
        ((HIDDEN, WEIGHT, TARGETS + 7), {}, "targets run from 7 to 7"),
        ((HIDDEN, WEIGHT, TARGETS - 100), {}, "targets run from -100 to -100"),
        ((HIDDEN, WEIGHT, TARGETS), {"bias": torch.zeros(6)}, "bias has shape"),
        ((HIDDEN, WEIGHT, TARGETS), {"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask has shape"),
        ((HIDDEN, WEIGHT, TARGETS), {"mask": TARGETS}, "mask has dtype"),
        ((HIDDEN, WEIGHT, TARGETS), {"temperature": 0.0}, "temperature is 0.0"),
        ((HIDDEN, WEIGHT, TARGETS), {"softcap": -1.0}, "softcap is -1.0"),
        ((HIDDEN, WEIGHT, TARGETS), {"chunk": 0}, "chunk is 0"),
    ],
)
def test_token_stats_refuses(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        token_stats(*arguments, **changes)


def test_an_exact_kl_refuses():
    with pytest.raises(ValueError, match="ref_hidden without its last axis has shape"):
        token_stats(HIDDEN, WEIGHT, None, ref=(HIDDEN[:1], WEIGHT, None))
    with pytest.raises(ValueError, match="ref_hidden has shape"):
        token_stats(HIDDEN, WEIGHT, None, ref=(HIDDEN[..., :2], WEIGHT, None))
    with pytest.raises(ValueError, match="ref_weight without its last axis has shape"):
        token_stats(HIDDEN, WEIGHT, None, ref=(HIDDEN, WEIGHT[:6], None))
