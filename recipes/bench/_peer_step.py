"""A training step of PyTorch's unit-scaling, timed on demand; run by an interpreter that has it.

    PYTHON _peer_step.py WIDTH LAYERS HEADS VOCAB SEQUENCES TOKENS THREADS compiled|eager

It prints the number of parameters and the version once it is ready. Each line that it reads then
is answered by the seconds of one more step; it imports nothing of JAX or of this project.
"""

# pyright: reportMissingImports=false
import importlib.metadata
import sys
import time

import torch
import unit_scaling


def main() -> None:
    """Answers each line of standard input by the time of a step."""
    *sizes, mode = sys.argv[1:]
    width, layers, heads, vocab, sequences, tokens, threads = map(int, sizes)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = unit_scaling.TransformerDecoder(width, vocab, layers, heads)
    optimizer = unit_scaling.optim.AdamW(model.parameters(), lr=2**-8)
    loss = torch.compile(model.loss) if mode == "compiled" else model.loss
    # One more token than positions: the loss is of those that follow another, as in ours.
    ids = torch.randint(0, vocab, (sequences, tokens + 1))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(ids).backward()
        optimizer.step()
        return time.perf_counter() - start

    step()
    parameters = sum(p.numel() for p in model.parameters())
    version = importlib.metadata.version("unit-scaling")
    print(parameters, version, torch.__version__, flush=True)
    for _ in sys.stdin:
        print(step(), flush=True)


if __name__ == "__main__":
    main()
