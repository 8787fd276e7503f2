"""Train a small MoE transformer with its experts spread over ranks, beside the same model without expert parallelism.

    torchrun --nproc-per-node 2 examples/train_moe/train.py --steps 100 --plot loss.png --save model.pt

With GPUs each rank takes one. Without, all runs on nbep's emulator, with torch's tensors on the CPU. Each rank has its
share of the experts, a copy of all else, and its share of the sequences.
"""

import argparse
import os

import torch
import torch.distributed
from expert_parallel import ExpertParallel
from model import EXPERTS, HIDDEN, Transformer, sequences_of

import nbep

LEARNING_RATE, BATCH = 1e-3, 16  # sequences of a step, all ranks together


def start():
    """The process group, and the device of this rank."""
    on_gpu = torch.cuda.is_available() and os.environ.get("NBEP_TARGET") != "emulator"
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        nbep.Buffer.set_num_sms(2)  # each takes the emulator its time
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return torch.distributed.group.WORLD, torch.device("cuda" if on_gpu else "cpu")


class Trainer:
    """A model and its optimizer; parallel is an ExpertParallel, or None for a process that does all."""

    def __init__(self, parallel, device):
        self.parallel, self.device = parallel, device
        self.model = Transformer(parallel).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, weight_decay=0.01)

    def step(self, number):
        """One step; the loss of the whole batch."""
        sequences = sequences_of(number, BATCH).to(self.device)
        if self.parallel is not None:
            sequences = sequences.chunk(self.parallel.group.size())[self.parallel.group.rank()]
        loss = self.model.loss(sequences, BATCH)
        self.optimizer.zero_grad()
        loss.backward()
        if self.parallel is not None:
            self.add_up_gradients()
        self.optimizer.step()
        return (loss if self.parallel is None else self.parallel.sum(loss.detach())).item()

    def add_up_gradients(self):
        """Of what every rank has a copy of. Experts have got theirs from all ranks: their tokens came from all."""
        for name, parameter in self.model.named_parameters():
            if not is_expert(name):
                self.parallel.sum(parameter.grad)


def is_expert(name):
    return name.endswith(("moe.up", "moe.down"))


def whole_state(model, parallel):
    """The parameters as a model without expert parallelism has them, on the CPU."""
    state = {}
    for name, values in model.state_dict().items():
        parts = [values]
        if is_expert(name):
            parts = [torch.empty_like(values) for _ in range(parallel.group.size())]
            torch.distributed.all_gather(parts, values.contiguous(), group=parallel.group)
        state[name] = torch.cat(parts).cpu() if is_expert(name) else values.cpu()
    return state


def train(parallel, device, num_steps, report=print):
    """Train both. The losses of each step on rank 0: with expert parallelism, and without."""
    trainer, losses = Trainer(parallel, device), []
    plain = Trainer(None, device) if parallel.group.rank() == 0 else None
    for number in range(num_steps):
        loss = trainer.step(number)
        if plain is not None:
            losses.append((loss, plain.step(number)))
            if number % 20 == 0 or number == num_steps - 1:
                report(f"step {number:4}: loss {loss:.5f}, without expert parallelism {losses[-1][1]:.5f}", flush=True)
    return trainer, losses


def plot(losses, path, where):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, height_ratios=(3, 1), layout="constrained")
    parallel, plain = zip(*losses, strict=True)
    above.plot(plain, color="tab:orange", linewidth=3.5, alpha=0.5, label="one process with all experts")
    above.plot(parallel, color="tab:blue", linewidth=1, label=where)
    above.set_ylabel("loss")
    above.legend()
    below.semilogy([max(abs(a - b), 1e-9) for a, b in losses], color="black", linewidth=0.8)
    below.set(ylabel="difference", xlabel="step")
    figure.savefig(path, dpi=110)


def run(group, device, num_steps, picture=None, file=None):
    """Train and tell; a picture of the losses and a file of the parameters are written if they have a name."""
    parallel = ExpertParallel(group, EXPERTS, HIDDEN)
    trainer, losses = train(parallel, device, num_steps)
    state = whole_state(trainer.model, parallel)
    if group.rank() == 0:
        largest = max(abs(a - b) for a, b in losses)
        print(f"{num_steps} steps on {group.size()} ranks: largest difference of the losses {largest:.2g}")
        if picture:
            where = "GPUs" if device.type == "cuda" else "ranks on the emulator"
            plot(losses, picture, f"{group.size()} {where}, {EXPERTS // group.size()} experts each")
        if file:
            torch.save(state, file)
    parallel.buffer.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", metavar="FILE", help="a picture of both losses")
    parser.add_argument("--save", metavar="FILE", help="the trained parameters, for decode.py")
    arguments = parser.parse_args()
    group, device = start()
    run(group, device, arguments.steps, arguments.plot, arguments.save)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
