"""Write golden.json: several steps of torch.optim.SGD and of Lion on one small tensor of f32 parameters.

Run by hand, from this folder, with PyTorch (2.15.0 wrote the file) and NumPy:

    OMP_NUM_THREADS=1 python make.py

`start` and `gradients` (one list per step) are the same for all cases. A case has its settings and, after every step,
the parameters; after the last step also its state: SGD's momentum buffer or Lion's moving average, or null.

Lion is not part of PyTorch: `lion` below is the algorithm of "Symbolic Discovery of Optimization Algorithms" (Chen et
al. 2023), written with the same tensor operations that PyTorch's optimizers use.

PyTorch's vector kernels round `add` with a factor once; its scalar loops for the remainder of a tensor round twice. The
tensor is a whole number of vectors, so that every element is rounded the same way.
"""

import json
import pathlib

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
ELEMS, STEPS, LR = 64, 6, 0.05

SGD = {
    "sgd": dict(momentum=0.0, nesterov=False, weight_decay=0.0),
    "sgd-decay": dict(momentum=0.0, nesterov=False, weight_decay=0.1),
    "momentum": dict(momentum=0.9, nesterov=False, weight_decay=0.0),
    "momentum-decay": dict(momentum=0.9, nesterov=False, weight_decay=0.1),
    "nesterov": dict(momentum=0.9, nesterov=True, weight_decay=0.0),
    "nesterov-decay": dict(momentum=0.9, nesterov=True, weight_decay=0.1),
}
LION = {
    "lion": dict(betas=[0.9, 0.99], weight_decay=0.0),
    "lion-decay": dict(betas=[0.95, 0.98], weight_decay=0.1),
}


def sgd(start, gradients, settings):
    p = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([p], lr=LR, dampening=0, foreach=False, **settings)
    steps = []
    for g in gradients:
        p.grad = g.clone()
        optimizer.step()
        steps.append(p.detach().clone())
    return steps, optimizer.state[p].get("momentum_buffer")


def lion(start, gradients, settings):
    p, m, (beta1, beta2) = start.clone(), torch.zeros_like(start), settings["betas"]
    steps = []
    for g in gradients:
        p.mul_(1 - LR * settings["weight_decay"])
        update = m.clone().mul_(beta1).add_(g, alpha=1 - beta1).sign_()
        p.add_(update, alpha=-LR)
        m.mul_(beta2).add_(g, alpha=1 - beta2)
        steps.append(p.clone())
    return steps, m


def numbers(tensor):
    """Format with nine digits, which identify an f32 exactly."""
    texts = [f"{x:.9g}" for x in tensor.tolist()]
    assert np.array_equal(np.array([float(t) for t in texts], np.float32), tensor.numpy())
    return "[" + ", ".join(texts) + "]"


def main():
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    start = 0.1 * torch.randn(ELEMS, generator=random)
    gradients = [torch.randn(ELEMS, generator=random) for _ in range(STEPS)]
    # One parameter that only weight decay changes: the sign of a zero gradient is zero.
    for g in gradients:
        g[7] = 0.0
    cases = []
    for run, all_settings in [(sgd, SGD), (lion, LION)]:
        for name, settings in all_settings.items():
            steps, state = run(start, gradients, settings)
            cases.append("    {" + f'"name": {json.dumps(name)}, "settings": {json.dumps(settings)},\n      "steps": ['
                         + ",\n        ".join(map(numbers, steps)) + "],\n"
                         + '      "state": ' + ("null" if state is None else numbers(state)) + "}")
    text = (f'{{\n  "lr": {LR},\n  "start": {numbers(start)},\n  "gradients": ['
            + ",\n    ".join(map(numbers, gradients)) + '],\n  "cases": [\n' + ",\n".join(cases) + "\n  ]\n}\n")
    json.loads(text)
    (HERE / "golden.json").write_text(text)


main()
