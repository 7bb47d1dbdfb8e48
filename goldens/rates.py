"""Print the learning rates of transformers' schedules that crates/train/src/rate.rs is tested against."""

import torch
from transformers.optimization import get_scheduler


def rates(name, warmup, total, kwargs):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs
    )
    for _ in range(total):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


for case in [
    ("constant", 3, 12, None),
    ("constant_with_warmup", 3, 12, None),
    ("linear", 3, 12, None),
    ("cosine", 3, 12, None),
    ("cosine", 0, 12, {"num_cycles": 1.5}),
    ("cosine_with_min_lr", 3, 12, {"min_lr": 3e-5}),
    ("cosine_with_min_lr", 3, 12, {"min_lr_rate": 0.25}),
]:
    print(case, list(rates(*case)))
