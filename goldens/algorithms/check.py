"""Check every case against the formulas of README.md, written down once more on their own.

    python check.py

Reads the case.json files alone: log-probabilities per token go in; losses, coefficients (the gradient with respect to
each log-probability, entropy or value), advantages and returns come out. Uses torch for autograd in float64, not TRL.
"""

import json
import math
import pathlib

import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).resolve().parent
torch.set_default_dtype(torch.float64)
WORST = {}


def leaf(rows):
    """One padded tensor with its mask."""
    width = max(map(len, rows))
    values = torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows])
    return values.requires_grad_(), mask


def compare(case, what, ours, theirs, tolerance):
    flat = lambda x: [v for row in x for v in flat(row)] if isinstance(x, list) else [x]
    ours = ours.tolist() if isinstance(ours, torch.Tensor) else ours
    ours, theirs = flat(ours), flat(theirs)
    assert len(ours) == len(theirs), (case, what, len(ours), len(theirs))
    scale = max(1.0 if what == "loss" else 1e-9, *(abs(v) for v in theirs))
    error = max(abs(a - b) for a, b in zip(ours, theirs)) / scale
    WORST[what] = max(WORST.get(what, 0.0), error if tolerance < 1e-6 else 0.0)
    assert error < tolerance, (case, what, error, ours[:8], theirs[:8])


def cut(values, rows):
    values = torch.zeros(len(rows), max(map(len, rows))) if values is None else values
    return [line[:len(row)] for line, row in zip(values.tolist(), rows)]


def dpo(name, case):
    o, expected = case["options"], case["expected"]
    beta, e = o["beta"], o.get("label_smoothing", 0.0)
    sides, grads = {}, {}
    for side in ("chosen", "rejected"):
        logps, mask = leaf(expected["token_logps"][side])
        ref, _ = leaf(expected["ref_token_logps"][side])
        sides[side] = (logps, ref.detach(), mask)
    lengths = {s: sides[s][2].sum(1) for s in sides}
    shared = torch.minimum(lengths["chosen"], lengths["rejected"])

    def total(values, mask):
        weight = mask
        if o.get("ld_alpha") is not None:
            weight = mask * torch.where(mask.cumsum(1) > shared[:, None], o["ld_alpha"], 1.0)
        return (values * weight).sum(1)

    pi = {s: total(v[0], v[2]) for s, v in sides.items()}
    ref = {s: total(v[1], v[2]) for s, v in sides.items()}
    c, r = pi["chosen"] - ref["chosen"], pi["rejected"] - ref["rejected"]
    alpha = o.get("f_alpha_divergence_coef", 0.5)
    divergence = {
        "reverse_kl": lambda x: x, "forward_kl": lambda x: 1 - torch.exp(-x),
        "js_divergence": lambda x: math.log(2) + F.logsigmoid(x),
        "alpha_divergence": lambda x: x if abs(alpha - 1) < 1e-6 else (torch.exp((alpha - 1) * x) - 1) / (alpha - 1),
    }[o.get("f_divergence_type", "reverse_kl")]
    sc, sr = divergence(c), divergence(r)
    l = beta * (sc - sr)
    ls, s = F.logsigmoid, torch.sigmoid
    mean_c, mean_r = sc / lengths["chosen"], sr / lengths["rejected"]

    def smoothed(d):
        return -(1 - e) * ls(beta * d) - e * ls(-beta * d)

    def discopop():
        q = s(l / o.get("discopop_tau", 0.05))
        return (1 - q) * -ls(l) + q * torch.exp(-l)

    def sft():
        logps, _, mask = sides["chosen"]
        return (-(logps * mask).sum() / mask.sum()).expand(len(c))

    def exo():
        return s(l) * (ls(l) - math.log(1 - e)) + s(-l) * (ls(-l) - math.log(e))

    per_pair = {
        "sigmoid": lambda: -ls(l), "hinge": lambda: torch.relu(1 - l), "exo_pair": exo,
        "ipo": lambda: (mean_c - mean_r - 0.5 / beta) ** 2, "robust": lambda: (-(1 - e) * ls(l) + e * ls(-l)) / (1 - 2 * e),
        "nca_pair": lambda: -ls(beta * c) - 0.5 * ls(-beta * c) - 0.5 * ls(-beta * r),
        "bco_pair": lambda: -ls(beta * c) - ls(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "aot": lambda: smoothed((pi["chosen"] - pi["rejected"]).sort()[0]
                                - (ref["chosen"] - ref["rejected"]).sort()[0]),
        "aot_unpaired": lambda: smoothed(c.sort()[0] - r.sort()[0]),
        "apo_zero": lambda: 1 - s(beta * c) + s(beta * r), "apo_down": lambda: s(beta * c) + 1 - s(beta * (c - r)),
        "discopop": discopop, "sft": sft, "sigmoid_norm": lambda: -ls(beta * (mean_c - mean_r)),
        "cdpo": lambda: smoothed(c - r),
    }
    weight = torch.ones(len(c))
    if o.get("use_weighting"):
        for side, (logps, _, mask) in sides.items():
            squares, _ = leaf(expected["token_log_sum_sq_probs"][side])
            weight = weight * torch.exp(((logps - squares) * mask).sum(1) / mask.sum(1)).detach()
    weights = o.get("loss_weights") or [1.0] * len(o["loss_type"])
    loss = sum(w * (weight * per_pair[t]()).mean() for t, w in zip(o["loss_type"], weights))
    loss.backward()
    tolerance = 1e-8 if case["precision"] == "float64" else 1e-5
    compare(name, "loss", loss.item(), expected["loss"], tolerance)
    for side, (logps, _, _) in sides.items():
        compare(name, "coefficients", cut(logps.grad, expected["token_logps"][side]), expected["coefficients"][side],
                tolerance)
    rewards = dict(chosen=beta * c, rejected=beta * r)
    for side in rewards:
        compare(name, "metrics", rewards[side].mean().item(), expected["metrics"][f"rewards/{side}"], 1e-5)


def reward(name, case):
    inputs, expected = case["inputs"], case["expected"]
    c, r = (torch.tensor(expected["rewards"][s], requires_grad=True) for s in ("chosen", "rejected"))
    margin = torch.tensor(inputs.get("margins", [0.0] * len(c)))
    loss = -F.logsigmoid(c - r - margin).mean()
    loss = loss + (case["options"].get("center_rewards_coefficient") or 0.0) * ((c + r) ** 2).mean()
    loss.backward()
    compare(name, "loss", loss.item(), expected["loss"], 1e-8)
    compare(name, "coefficients", [c.grad.tolist(), r.grad.tolist()], list(expected["coefficients"].values()), 1e-8)


def group_rewards(inputs, options):
    """Weighted sums, None where no function gave a reward."""
    weights = options.get("reward_weights") or [1.0] * len(inputs["rewards"])
    rows = list(zip(*inputs["rewards"]))
    return [None if all(v is None for v in row) else sum(w * v for w, v in zip(weights, row) if v is not None)
            for row in rows]


def mean_std(values):
    values = [v for v in values if v is not None]
    if not values:
        return None, None
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None


def grpo_advantages(inputs, options):
    size = options["num_generations"]
    if options.get("multi_objective_aggregation") == "normalize_then_sum":
        columns = []
        for column in inputs["rewards"]:
            out = []
            for start in range(0, len(column), size):
                mean, std = mean_std(column[start:start + size])
                out += [None if v is None or std is None else (v - mean) / (std + 1e-4)
                        for v in column[start:start + size]]
            columns.append(out)
        # A value without a standard deviation counts as 0 in the sum, and its row still as scored.
        total = group_rewards(dict(rewards=columns), options)
        scored = [any(c[i] is not None for c in inputs["rewards"]) for i in range(len(total))]
        total = [(t or 0.0) if s else None for t, s in zip(total, scored)]
        mean, std = mean_std(total)
        return [0.0 if t is None else (t - mean) / (std + 1e-4) for t in total]
    rewards = group_rewards(inputs, options)
    scale = options.get("scale_rewards", "group")
    _, batch_std = mean_std(rewards)
    out = []
    for start in range(0, len(rewards), size):
        group = rewards[start:start + size]
        mean, std = mean_std(group)
        std = batch_std if scale == "batch" else std
        for value in group:
            if value is None or (scale != "none" and std is None):
                out.append(0.0)
            else:
                out.append((value - mean) / (1.0 if scale == "none" else std + 1e-4))
    return out


def grpo(name, case):
    o, inputs, expected = case["options"], case["inputs"], case["expected"]
    advantages = grpo_advantages(inputs, o)
    compare(name, "advantages", advantages, expected["advantages"], 1e-8)
    if "coefficients" not in expected:
        return
    logps, mask = leaf(expected["token_logps"])
    entropy, _ = leaf(expected["token_entropies"])
    tokens = mask.sum(1)
    if o.get("mask_truncated_completions"):
        ends = torch.tensor([float(ids[-1] == 2) for ids in inputs["completion_ids"]])
        mask = mask * ends[:, None]
    old = leaf(inputs["old_token_logps"])[0].detach() if "old_token_logps" in inputs else logps.detach()
    a = torch.tensor(advantages)[:, None]
    count = mask.sum(1).clamp(min=1)
    ratio_log = (logps - old) * mask
    sequence = o.get("importance_sampling_level", "token") == "sequence"
    rho = torch.exp((ratio_log.sum(1) / count)[:, None].expand_as(mask) if sequence else ratio_log)
    low, kind = o.get("epsilon", 0.2), o.get("loss_type", "dapo")
    high = o.get("epsilon_high") if o.get("epsilon_high") is not None else low
    beta = o.get("beta", 0.0)
    if kind == "cispo":
        per_token = -rho.clamp(max=high).detach() * a * logps
    elif kind == "sapo":
        tau = torch.where(a > 0, o.get("sapo_temperature_pos", 1.0), o.get("sapo_temperature_neg", 1.05))
        per_token = -4 / tau * torch.sigmoid(tau * (rho - 1)) * a
    elif kind == "vespo":
        log_w = (ratio_log.clamp(-20, 20).sum(1, keepdim=True)).clamp(math.log(1e-8), 20).detach()
        k = torch.where(a >= 0, o.get("vespo_k_pos", 2.0), o.get("vespo_k_neg", 3.0))
        lam = torch.where(a >= 0, o.get("vespo_lambda_pos", 3.0), o.get("vespo_lambda_neg", 2.0))
        per_token = -torch.exp(lam + k * log_w - lam * log_w.exp()) * a * logps
    else:
        capped = rho if o.get("delta") is None else rho.clamp(max=o["delta"])
        per_token = -torch.min(capped * a, rho.clamp(1 - low, 1 + high) * a)
    if o.get("off_policy_mask_threshold") is not None:
        drift = ((old - logps.detach()) * mask).sum(1, keepdim=True) / count[:, None]
        per_token = per_token * ((a >= 0) | (drift <= o["off_policy_mask_threshold"]))
    kept = mask
    if o.get("top_entropy_quantile", 1.0) < 1.0:
        threshold = torch.quantile(entropy.detach()[mask.bool()], 1 - o["top_entropy_quantile"])
        kept = mask * (entropy.detach() >= threshold)
        per_token = per_token * kept
    if beta:
        x = leaf(expected["ref_token_logps"])[0].detach() - logps
        kl = torch.exp(x) - x - 1
        per_token = per_token + beta * kl * (rho if o.get("use_bias_correction_kl", True) else 1.0)
    per_row = (per_token * mask).sum(1)
    loss = {"grpo": lambda: (per_row / count).mean(), "sapo": lambda: (per_row / count).mean(),
            "luspo": lambda: per_row.mean(), "dr_grpo": lambda: per_row.sum() / (len(a) * o["max_completion_length"]),
            }.get(kind, lambda: per_row.sum() / mask.sum())()
    loss = loss - o.get("entropy_coef", 0.0) * (entropy * kept).sum() / kept.sum().clamp(min=1)
    loss.backward()
    compare(name, "loss", loss.item(), expected["loss"], 1e-8)
    compare(name, "coefficients", cut(logps.grad, expected["token_logps"]), expected["coefficients"], 1e-7)
    if "entropy_coefficients" in expected:
        compare(name, "entropy", cut(entropy.grad, expected["token_logps"]), expected["entropy_coefficients"], 1e-8)


def rloo(name, case):
    o, inputs, expected = case["options"], case["inputs"], case["expected"]
    logps, mask = leaf(expected["token_logps"])
    if o.get("mask_truncated_completions"):
        mask = mask * torch.tensor([float(ids[-1] == 2) for ids in inputs["completion_ids"]])[:, None]
    rewards = group_rewards(inputs, o)
    if o.get("reward_clip_range"):
        low, high = o["reward_clip_range"]
        rewards = [None if v is None else min(max(v, low), high) for v in rewards]
    beta = o.get("beta", 0.05)
    if beta:
        kl = ((logps.detach() - leaf(expected["ref_token_logps"])[0].detach()) * mask).sum(1).tolist()
        rewards = [None if v is None else v - beta * k for v, k in zip(rewards, kl)]
    out = []
    for start in range(0, len(rewards), o["num_generations"]):
        group = rewards[start:start + o["num_generations"]]
        scored = [v for v in group if v is not None]
        out += [None if v is None or len(scored) < 2 else v - (sum(scored) - v) / (len(scored) - 1) for v in group]
    if o.get("normalize_advantages"):
        mean, std = mean_std(out)
        out = [None if v is None else (v - mean) / (std + 1e-4) for v in out]
    advantages = [v or 0.0 for v in out]
    compare(name, "advantages", advantages, expected["advantages"], 1e-8)
    total = (logps * mask).sum(1)
    old = torch.tensor(inputs["old_logps"]) if "old_logps" in inputs else total.detach()
    a, rho = torch.tensor(advantages), torch.exp(total - old)
    low = o.get("epsilon", 0.2)
    loss = -torch.min(rho * a, rho.clamp(1 - low, 1 + (o.get("epsilon_high") or low)) * a).mean()
    loss.backward()
    compare(name, "loss", loss.item(), expected["loss"], 1e-8)
    compare(name, "coefficients", cut(logps.grad, expected["token_logps"]), expected["coefficients"], 1e-7)


def whiten(values, mask, shift_mean):
    n = mask.sum()
    mean = (values * mask).sum() / n
    variance = ((values - mean) ** 2 * mask).sum() / (n - 1)
    return ((values - mean) / torch.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean)) * mask


def ppo(name, case):
    o, inputs, expected = case["options"], case["inputs"], case["expected"]
    limit = o["response_length"]
    logps, mask = leaf(expected["token_logps"])
    ref = leaf(expected["ref_token_logps"])[0].detach()
    values, value_mask = leaf(expected["token_values"])
    logps, values = logps.detach(), values.detach()
    lengths = [len(ids) for ids in inputs["completion_ids"]]
    assert value_mask.sum(1).tolist() == [min(n + 1, limit) for n in lengths]
    x = (ref - logps) * mask
    kl = -x if o["kl_estimator"] == "k1" else torch.exp(x) - 1 - x
    rewards = F.pad(-o["kl_coef"] * kl * mask, (0, values.shape[1] - kl.shape[1]))
    # `scores` of the file already hold the penalty; here it only has to be consistent.
    for i, (n, score) in enumerate(zip(lengths, expected["scores"])):
        rewards[i, n if n < limit else n - 1] += score
    if o["whiten_rewards"]:
        before = expected["token_rewards_before_whitening"]
        compare(name, "rewards", cut(rewards, expected["token_values"]), before, 1e-8)
        rewards = whiten(rewards, value_mask, False)
    compare(name, "rewards", cut(rewards, expected["token_values"]), expected["token_rewards"], 1e-8)
    advantages, following = torch.zeros_like(values), torch.zeros(len(lengths))
    for t in reversed(range(values.shape[1])):
        after = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        following = rewards[:, t] + o["gamma"] * after - values[:, t] + o["gamma"] * o["lam"] * following
        advantages[:, t] = following
    returns = advantages + values
    compare(name, "returns", cut(returns, expected["token_values"]), expected["returns"], 1e-8)
    width = mask.shape[1]
    advantages = whiten(advantages[:, :width], mask, True)
    compare(name, "advantages", cut(advantages, expected["token_logps"]), expected["advantages"], 1e-8)
    for step in expected["steps"]:
        new, _ = leaf(step["new_token_logps"])
        v, _ = leaf(step["new_token_values"])
        rho = torch.exp((new - logps) * mask)
        clip = rho.clamp(1 - o["cliprange"], 1 + o["cliprange"])
        policy = (torch.max(-advantages * rho, -advantages * clip) * mask).sum() / mask.sum()
        clipped = torch.minimum(torch.maximum(v, values - o["cliprange_value"]), values + o["cliprange_value"])
        value = 0.5 * (torch.max((v - returns) ** 2, (clipped - returns) ** 2) * value_mask).sum() / value_mask.sum()
        (policy + o["vf_coef"] * value).backward()
        compare(name, "loss", [policy.item(), value.item()], [step["pg_loss"], step["vf_loss"]], 1e-8)
        compare(name, "coefficients", cut(new.grad, expected["token_logps"]), step["coefficients"], 1e-7)
        compare(name, "value coefficients", cut(v.grad, expected["token_values"]), step["value_coefficients"], 1e-7)


def main():
    count = 0
    for path in sorted(HERE.glob("*/*/case.json")):
        case = json.loads(path.read_text())
        if "trl" in case["expected"] or "losses" in case["expected"]:
            continue  # TRL's value beside ours, or several steps
        globals()[case["algorithm"]](f"{case['algorithm']}/{case['case']}", case)
        count += 1
    print(count, "cases;", ", ".join(f"{k} {v:.0e}" for k, v in WORST.items()), "(largest differences)")


if __name__ == "__main__":
    main()
