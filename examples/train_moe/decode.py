"""Decode greedily with the model that train.py has saved: its experts are spread over ranks, in low-latency mode.

    torchrun --nproc-per-node 2 examples/train_moe/decode.py model.pt

Each rank has sequences of its own, in two micro-batches. While the tokens of one travel, the other one computes:

 micro-batch 0   attention | dispatch ...... receive, experts | combine ...... receive, attention | dispatch
 micro-batch 1             attention | dispatch ...... receive, experts | combine ...... receive, attention |
"""

import argparse
import os

import torch
import torch.distributed
from model import EXPERTS, HIDDEN, LENGTH, Transformer, sequences_of
from train import is_expert, start

import nbep

SEQUENCES, MICRO_BATCHES = 8, 2  # of a rank


class LowLatencyExperts:
    """The ranks of a group, each with its share of the experts, for few tokens at a time."""

    def __init__(self, group, num_experts, hidden, max_tokens):
        share = num_experts // group.size()
        self.own_experts = slice(group.rank() * share, (group.rank() + 1) * share)
        self.num_experts, self.max_tokens = num_experts, max_tokens
        num_rdma_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(max_tokens, hidden, group.size(), num_experts)
        nodes = {"num_nvl_peers": int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))}  # a host is a node
        self.buffer = nbep.Buffer(group, num_rdma_bytes=num_rdma_bytes, low_latency_mode=True, **nodes)

    def dispatch(self, x, topk_idx):
        """recv_x [experts here, rows, hidden], the handle for combine, and what to call before recv_x is read."""
        recv_x, _, handle, _, receive = self.buffer.low_latency_dispatch(
            x, topk_idx, self.max_tokens, self.num_experts, use_fp8=False, return_recv_hook=True
        )
        return recv_x, handle, receive

    def combine(self, x, topk_idx, topk_weights, handle):
        """The sums, and what to call before they are read."""
        combined_x, _, receive = self.buffer.low_latency_combine(
            x, topk_idx, topk_weights, handle, return_recv_hook=True
        )
        return combined_x, receive


def step(model, experts, tokens, place, past):
    """The next token of each sequence, from its token at a place [sequences, 1]. Yields while tokens travel."""
    x = model.embed(tokens, place)
    for layer, seen in zip(model.layers, past, strict=True):
        x = x + layer.attention(layer.attention_norm(x), seen)
        rows = layer.moe_norm(x).flatten(0, 1)
        topk_idx, topk_weights, _ = layer.moe.route(rows)
        recv_x, handle, receive = experts.dispatch(rows.bfloat16(), topk_idx)
        yield
        receive()
        y = layer.moe.packed_experts(recv_x)
        combined_x, receive = experts.combine(y, topk_idx, topk_weights, handle)
        yield
        receive()
        x = x + combined_x.float().view_as(x)
    return model.out(model.norm(x)).argmax(-1)


def take_turns(*steps):
    """Run generators, each to its next yield in turn; what they return."""
    results, running = [None] * len(steps), dict(enumerate(steps))
    while running:
        for number, one in list(running.items()):
            try:
                next(one)
            except StopIteration as end:
                results[number] = end.value
                del running[number]
    return results


@torch.no_grad()
def decode(model, experts, prompts):
    """Prompts [sequences, tokens], with LENGTH tokens after them. The prompt goes in token by token, too."""
    batches = list(prompts.chunk(MICRO_BATCHES))
    pasts = [[[] for _ in model.layers] for _ in batches]  # of each layer: keys and values
    for place in range(prompts.shape[1] + LENGTH - 1):
        steps = [
            step(model, experts, batch[:, place : place + 1], place, past)
            for batch, past in zip(batches, pasts, strict=True)
        ]
        found = take_turns(*steps)
        if place >= prompts.shape[1] - 1:
            batches = [torch.cat(parts, dim=1) for parts in zip(batches, found, strict=True)]
    return torch.cat(batches)


@torch.no_grad()
def decode_plain(model, prompts):
    """The same by a model that has all experts, and that sees all tokens again each time."""
    for _ in range(LENGTH):
        prompts = torch.cat([prompts, model(prompts)[:, -1:].argmax(-1)], dim=1)
    return prompts


def load(state, device, experts=None):
    """A model with these parameters; with experts of this rank only."""
    model = Transformer(experts)
    own = slice(None) if experts is None else experts.own_experts
    model.load_state_dict({name: values[own] if is_expert(name) else values for name, values in state.items()})
    return model.to(device)


def run(group, device, state):
    """Decode sequences that training has not seen, and compare with the model that has all experts."""
    experts = LowLatencyExperts(group, EXPERTS, HIDDEN, SEQUENCES // MICRO_BATCHES)
    sequences = sequences_of(1_000_000 + group.rank(), SEQUENCES).to(device)
    prompts = sequences[:, : LENGTH + 1]
    decoded = decode(load(state, device, experts), experts, prompts)
    are_same = torch.equal(decoded, decode_plain(load(state, device), prompts))
    digits = "".join(map(str, decoded[0].tolist()))
    right = (decoded == sequences).all(1).sum().item()
    same = "the same tokens as" if are_same else "OTHER tokens than"
    print(
        f"rank {group.rank()}: {digits[:LENGTH]} -> {digits[-LENGTH:]}; {right} of {SEQUENCES} reversed, "
        f"{same} without expert parallelism",
        flush=True,
    )
    experts.buffer.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="what train.py --save has written")
    state = torch.load(parser.parse_args().model, map_location="cpu", weights_only=True)
    group, device = start()
    run(group, device, state)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
