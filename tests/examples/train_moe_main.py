"""What test_train_moe.py runs, once per rank under torchrun. A check prints its name when it has found nothing wrong.

torchrun --standalone --nproc-per-node 2 tests/examples/train_moe_main.py FOLDER
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[2] / "examples" / "train_moe"))
sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))

import decode
import elastic_torch
import torch
import torch.distributed
import train
from expert_parallel import ExpertParallel
from model import EXPERTS, HIDDEN, MoE, Transformer
from train import Trainer, is_expert, start, whole_state

COLUMNS, CHOICES = 64, 3


def routed_tokens(group):
    """Of each rank: x, topk_idx, topk_weights and the gradient of the sums. All are integers that bf16 has."""
    generator = torch.Generator().manual_seed(7)
    num_experts = 4 * group.size()

    def integers(least, most, *shape):
        return torch.randint(least, most + 1, shape, generator=generator).float()

    ranks = []
    for num_tokens in [9, 0, 4, 6][: group.size()]:
        topk_idx = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:CHOICES] for _ in range(num_tokens)]
            or [torch.zeros(CHOICES, dtype=torch.int64)]
        )[:num_tokens]
        topk_idx[integers(0, 3, num_tokens, CHOICES) == 0] = -1
        topk_idx[2:3] = -1  # a token that goes nowhere
        grad = integers(-2, 2, num_tokens, COLUMNS)
        ranks.append((integers(-4, 4, num_tokens, COLUMNS), topk_idx, integers(1, 3, num_tokens, CHOICES), grad))
    return ranks, integers(-1, 2, num_experts, COLUMNS)


def scaled(x, topk_idx, topk_weights, scales):
    """Experts that multiply: each token's sum over its choices."""
    total = torch.zeros_like(x)
    for expert, scale in enumerate(scales):
        token, choice = (topk_idx == expert).nonzero(as_tuple=True)
        total = total.index_add(0, token, x[token] * scale * topk_weights[token, choice, None])
    return total


def gradients_are_those_without_communication(group, device):
    ranks, scales = routed_tokens(group)
    ranks = [[values.to(device) for values in rank] for rank in ranks]
    parallel = ExpertParallel(group, len(scales), COLUMNS)
    x, topk_idx, topk_weights, grad = ranks[group.rank()]
    x, topk_weights = x.bfloat16().requires_grad_(), topk_weights.clone().requires_grad_()
    own_scales = scales.to(device)[parallel.own_experts].clone().requires_grad_()
    recv_x, recv_topk_idx, recv_topk_weights, handle = parallel.dispatch(x, topk_idx, topk_weights)
    y = scaled(recv_x.float(), recv_topk_idx, recv_topk_weights, own_scales).bfloat16()
    combined_x = parallel.combine(y, handle)
    # All weights count besides, those too that stand where the expert is another rank's.
    ((combined_x.float() * grad).sum() + 3 * recv_topk_weights.sum()).backward()
    parallel.buffer.destroy()

    scales = scales.to(device).requires_grad_()
    for rank, (plain_x, _, plain_weights, _) in enumerate(ranks):
        plain_x.requires_grad_()
        plain_weights.requires_grad_()
        sums = scaled(plain_x, ranks[rank][1], plain_weights, scales)
        if rank == group.rank():
            assert torch.equal(sums, combined_x.float())
        ((sums * ranks[rank][3]).sum() + 3 * plain_weights[ranks[rank][1] >= 0].sum()).backward()
    assert torch.equal(x.grad.float(), ranks[group.rank()][0].grad)
    assert torch.equal(topk_weights.grad, ranks[group.rank()][2].grad)
    assert torch.equal(own_scales.grad, scales.grad[parallel.own_experts])


class RoundedMoE(MoE):
    """All experts in one process, with the sums of each rank's share rounded as they are when they travel."""

    num_shares = 1

    def own_experts(self, x, topk_idx, topk_weights):
        x = x.float()  # here the gradients of the shares are added up, before they are rounded again
        total, share = torch.zeros_like(x), EXPERTS // self.num_shares
        for first in range(0, EXPERTS, share):
            part = SimpleNamespace(up=self.up[first : first + share], down=self.down[first : first + share])
            is_here = (topk_idx >= first) & (topk_idx < first + share)
            idx_here = torch.where(is_here, topk_idx - first, -1)
            total = total + MoE.own_experts(part, x.bfloat16(), idx_here, topk_weights)
        return total.bfloat16()


def losses_and_gradients_are_those_of_the_model_in_one_process(group, device):
    """With the same rounding; without it they differ by as much as bf16 rounds."""
    parallel = ExpertParallel(group, EXPERTS, HIDDEN)
    trainer, rounded, plain = Trainer(parallel, device), Trainer(None, device), Trainer(None, device)
    # GPUs sum up a matrix product in another order if it has other rows, and then bf16 rounds elsewhere.
    limit = 1e-5 if device.type == "cpu" else 1e-2
    RoundedMoE.num_shares = group.size()
    for layer in rounded.model.layers:
        layer.moe.__class__ = RoundedMoE
    for number in range(3):
        loss, same, near = (one.step(number) for one in (trainer, rounded, plain))
        assert abs(loss - same) < 10 * limit, (number, loss, same)
        assert abs(loss - near) < 1e-2, (number, loss, near)
        if number > 0:  # by now AdamW has made steps of one size out of gradients that are almost 0
            continue
        for (name, values), whole in zip(trainer.model.named_parameters(), rounded.model.parameters(), strict=True):
            wanted = whole.grad[parallel.own_experts] if is_expert(name) else whole.grad
            assert (values.grad - wanted).norm() < limit * wanted.norm(), name
    parallel.buffer.destroy()


def the_parameters_of_all_ranks_make_a_whole_model(group, device):
    parallel = ExpertParallel(group, EXPERTS, HIDDEN)
    trainer, losses = train.train(parallel, device, 0)
    state, whole = whole_state(trainer.model, parallel), Transformer().state_dict()
    assert losses == []
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    parallel.buffer.destroy()


CHECKS = (
    gradients_are_those_without_communication,
    losses_and_gradients_are_those_of_the_model_in_one_process,
    the_parameters_of_all_ranks_make_a_whole_model,
)


def main():
    folder = Path(sys.argv[1])
    group, device = start()
    rank = group.rank()
    elastic_torch.main(group, device)
    for check in CHECKS:
        check(group, device)
        print(f"rank {rank}: {check.__name__}", flush=True)
    plain = Trainer(None, device)
    for number in range(50 if rank == 0 else 0):
        plain.step(number)
    if rank == 0:
        torch.save(plain.model.state_dict(), folder / "trained.pt")
    train.run(group, device, 1, folder / "loss.png", folder / "model.pt")
    decode.run(group, device, torch.load(folder / "trained.pt", map_location="cpu", weights_only=True))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
