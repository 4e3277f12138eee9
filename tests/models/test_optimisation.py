"""DCN and its optimiser: state, learning rate, clipping, accumulation."""

import pytest
import torch
from small_dcn import make_batch, make_dcn

from fastcross import optim


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_optimizer_resumes_bit_for_bit(name):
    def train(model, optimizer, seeds):
        for seed in seeds:
            dense, categorical = make_batch(seed=seed)
            optimizer.zero_grad()
            model.loss(model(dense, categorical), (dense[:, 0] > 0).float()).backward()
            optim.clip_grad_norm(model, 1.0)
            optimizer.step()

    model = make_dcn()
    optimizer = optim.configure(model, lr=0.01, name=name)
    train(model, optimizer, range(3))
    twin = make_dcn()
    twin.load_state_dict(model.state_dict())
    twin_optimizer = optim.configure(twin, lr=0.5, name=name)
    twin_optimizer.load_state_dict(optimizer.state_dict())
    train(twin, twin_optimizer, range(3, 6))
    fresh = make_dcn()
    fresh_optimizer = optim.configure(fresh, lr=0.01, name=name)
    train(fresh, fresh_optimizer, range(6))
    for key, value in fresh.state_dict().items():
        assert torch.equal(twin.state_dict()[key], value), key


def test_learning_rate_reaches_every_parameter():
    model = make_dcn()
    before = {key: value.clone() for key, value in model.named_parameters()}
    optimizer = optim.configure(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    dense, categorical = make_batch()
    model.loss(model(dense, categorical), torch.ones(32)).backward()
    optimizer.step()
    scheduler.step()
    assert len(optimizer.param_groups) == 2
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    assert all(not torch.equal(value, before[key]) for key, value in model.named_parameters())


def test_clip_counts_shared_rows_once():
    model, dense_model = make_dcn(), make_dcn(sparse_gradients=False)
    dense, categorical = make_batch()
    categorical[:, 0] = 3
    norms = []
    for each in (model, dense_model):
        each.loss(each(dense, categorical), torch.ones(32)).backward()
        norms.append(optim.clip_grad_norm(each, 0.01))
    torch.testing.assert_close(norms[0], norms[1])
    assert norms[0] > 0.01
    for ours, theirs in zip(model.parameters(), dense_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_dense(), theirs.grad, rtol=1e-3, atol=1e-7)
    total = torch.stack([p.grad.to_dense().square().sum() for p in model.parameters()]).sum().sqrt()
    assert float(total) == pytest.approx(0.01, rel=1e-3)
    assert float(optim.clip_grad_norm(model, float("inf"))) == pytest.approx(0.01, rel=1e-3)


def test_gradients_accumulate_over_batches():
    model, expected = make_dcn(), make_dcn(sparse_gradients=False)
    for each in (model, expected):
        for seed in (0, 1):
            each(*make_batch(seed=seed)).sum().backward()
        optim.configure(each, lr=0.1, name="sgd").step()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
