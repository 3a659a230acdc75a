"""The choice of experts: the kernel against the reference, and the reference against transformers' routers."""

from __future__ import annotations

import pytest
import torch
from support.closeness import check_close

from rayllm_kernels.ops import Routing

ROUTINGS = {
    "softmax": Routing(3, "softmax"),
    "normalised, rounded": Routing(4, "softmax", normalised=True, rounded=True),
    "all experts": Routing(12, "softmax", normalised=True),
    "sigmoid, scaled": Routing(1, "sigmoid", scale=2.5),
    "sigmoid, normalised": Routing(5, "sigmoid", normalised=True, scale=0.5),
    "of the chosen": Routing(4, "top_k_softmax", rounded=True),
    "groups": Routing(4, "sigmoid", normalised=True, num_groups=4, top_k_groups=2),
    "groups by their best": Routing(5, "softmax", num_groups=3, top_k_groups=2, scale=1.5, best_of_group=1),
    "groups of two": Routing(2, "softmax", num_groups=6, top_k_groups=1),
}


@pytest.mark.parametrize(("dtype", "corrected"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_kernel_and_reference_choose_alike(randn, kernels, reference, name, corrected, dtype):
    routing = ROUTINGS[name]
    logits = 3 * randn(5, 30, dtype=dtype)[:, 5:17]
    correction = randn(12) if corrected else None
    weights, experts = kernels.route(logits, routing, correction)
    expected, expected_experts = reference.route(logits, routing, correction)
    assert torch.equal(experts, expected_experts)
    assert experts.dtype == torch.int32
    if routing.rounded:
        assert torch.equal(weights, weights.to(dtype).float())
        check_close(weights.to(dtype), expected.to(dtype))
    else:
        check_close(weights, expected)


def test_factors_of_experts(randn, each):
    """They multiply the weights, and have no part in the choice."""
    logits, factors = 3 * randn(5, 12), randn(12)
    plain, experts = each.route(logits, ROUTINGS["softmax"])
    weights, same = each.route(logits, ROUTINGS["softmax"], None, factors)
    assert torch.equal(same, experts)
    check_close(weights, plain * factors[experts.long()])
    with pytest.raises(ValueError, match=r"^factors "):
        each.route(logits, ROUTINGS["softmax"], None, factors[1:])


def test_equal_logits_go_to_the_first_experts(each, device):
    weights, experts = each.route(torch.zeros(2, 7, device=device), Routing(3, "softmax"))
    assert experts.tolist() == [[0, 1, 2]] * 2
    check_close(weights, torch.full((2, 3), 1 / 7, device=device))


def test_what_is_no_number_still_goes_to_experts_that_exist(kernels, device):
    logits = torch.full((3, 5), float("nan"), device=device)
    logits[1], logits[2, 1:] = -logits[1], float("-inf")
    _, experts = kernels.route(logits, Routing(4, "softmax", normalised=True))
    assert ((experts >= 0) & (experts < 5)).all()
    assert all(len(set(row)) == 4 for row in experts.tolist())


@pytest.mark.parametrize("name", ["normalised, rounded", "groups"])
def test_tokens_do_not_know_of_each_other(randn, each, name):
    logits, correction = randn(12, 12), randn(12)
    whole = each.route(logits, ROUTINGS[name], correction, deterministic=True)
    for first, end in ((0, 1), (3, 4), (5, 11)):
        part = each.route(logits[first:end], ROUTINGS[name], correction, deterministic=True)
        for ours, theirs in zip(part, whole, strict=True):
            assert torch.equal(ours, theirs[first:end])


def test_no_tokens(each, device):
    weights, experts = each.route(torch.zeros(0, 5, device=device), Routing(2, "sigmoid"), deterministic=True)
    assert weights.shape == experts.shape == (0, 2)


def test_errors(each, randn):
    logits = randn(2, 12)
    for name, routing in {
        "routing.scores": Routing(1, "hardmax"),
        "routing.top_k": Routing(13, "softmax"),
        "routing.best_of_group": Routing(1, "softmax", best_of_group=3),
        "routing.num_groups": Routing(1, "softmax", num_groups=5),
        "routing.top_k_groups": Routing(1, "softmax", num_groups=3, top_k_groups=4),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} "):
            each.route(logits, routing)
    with pytest.raises(ValueError, match=r"^routing.top_k "):
        each.route(logits, Routing(4, "softmax", num_groups=4, top_k_groups=1))
    with pytest.raises(ValueError, match=r"^correction "):
        each.route(logits, Routing(1, "softmax"), randn(11))
    with pytest.raises(ValueError, match=r"^logits "):
        each.route(logits[0], Routing(1, "softmax"))
