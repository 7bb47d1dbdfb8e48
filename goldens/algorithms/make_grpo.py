"""Write grpo/<case>/: what TRL's GRPOTrainer computes on fixed rollouts, three prompts with four completions each.

    python make_grpo.py

`advantages-*` are the rewards and advantages alone; the other cases are losses. `old_token_logps` are given numbers
near the policy's own log-probabilities, so that ratios differ from 1 and clipping is active.
"""

from rollouts import *
import trl

OUT = HERE / "grpo"
ALL_GRADIENTS = {"dapo-everything"}
ON_POLICY = {"on-policy": dict(), "on-policy-beta": dict(beta=0.1), "on-policy-grpo": dict(loss_type="grpo")}
CASES = {
    "grpo": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo": dict(loss_type="dapo"),
    "cispo": dict(loss_type="cispo", epsilon_high=1.25),
    "sapo": dict(loss_type="sapo"),
    "sapo-temperatures": dict(loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0),
    "luspo": dict(loss_type="luspo", importance_sampling_level="sequence"),
    "luspo-token": dict(loss_type="luspo"),
    "vespo": dict(loss_type="vespo"),
    "vespo-parameters": dict(loss_type="vespo", vespo_k_pos=1.5, vespo_lambda_pos=2.0, vespo_k_neg=2.0,
                             vespo_lambda_neg=1.0),
    "grpo-sequence": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.05),
    "dapo-sequence": dict(loss_type="dapo", importance_sampling_level="sequence", epsilon=0.05),
    "cispo-sequence": dict(loss_type="cispo", importance_sampling_level="sequence", epsilon_high=1.05),
    "sapo-sequence": dict(loss_type="sapo", importance_sampling_level="sequence"),
    "dapo-epsilon_high": dict(epsilon_high=0.28),
    "dapo-delta": dict(delta=1.3),
    "grpo-delta-sequence": dict(loss_type="grpo", delta=1.08, epsilon=0.05, importance_sampling_level="sequence"),
    "grpo-beta": dict(loss_type="grpo", beta=0.2),
    "grpo-beta-uncorrected": dict(loss_type="grpo", beta=0.2, use_bias_correction_kl=False),
    "grpo-beta-sequence": dict(loss_type="grpo", beta=0.2, importance_sampling_level="sequence"),
    "dr_grpo-beta": dict(loss_type="dr_grpo", beta=0.2),
    "cispo-beta": dict(loss_type="cispo", beta=0.2, epsilon_high=1.25),
    "vespo-beta": dict(loss_type="vespo", beta=0.2),
    "luspo-beta": dict(loss_type="luspo", beta=0.2, importance_sampling_level="sequence"),
    "dapo-entropy_coef": dict(entropy_coef=0.3),
    "grpo-entropy_coef": dict(loss_type="grpo", entropy_coef=0.3),
    "dapo-top_entropy_quantile": dict(top_entropy_quantile=0.3),
    "dapo-top_entropy_quantile-entropy_coef": dict(top_entropy_quantile=0.3, entropy_coef=0.3),
    "grpo-top_entropy_quantile-beta": dict(loss_type="grpo", top_entropy_quantile=0.3, beta=0.2),
    "grpo-mask_truncated": dict(loss_type="grpo", mask_truncated_completions=True),
    "bnpo-mask_truncated": dict(loss_type="bnpo", mask_truncated_completions=True),
    "dr_grpo-mask_truncated": dict(loss_type="dr_grpo", mask_truncated_completions=True),
    "dapo-mask_truncated": dict(mask_truncated_completions=True),
    "grpo-mask_truncated-sequence": dict(loss_type="grpo", mask_truncated_completions=True, epsilon=0.05,
                                         importance_sampling_level="sequence"),
    "dapo-temperature": dict(temperature=0.7),
    "dapo-temperature-beta-entropy_coef": dict(temperature=1.3, beta=0.2, entropy_coef=0.3),
    "dapo-off_policy_mask": dict(off_policy_mask_threshold=0.0),
    "dapo-everything": dict(temperature=0.8, beta=0.1, epsilon_high=0.28, delta=1.5, entropy_coef=0.1,
                            top_entropy_quantile=0.6, mask_truncated_completions=True, scale_rewards="batch"),
}
# Two functions, of which one has no opinion on some rows. Row 1 has no reward at all, the second group only one reward,
# the third four equal ones.
PARTIAL = [[1.0, None, 1.5, 2.0, None, None, 0.75, None, 0.25, 0.25, 0.25, 0.25],
           [0.5, None, None, -1.0, None, None, None, None, 1.0, 1.0, 1.0, 1.0]]
FULL = [REWARDS, [0.5, 0.0, 1.0, -1.0, 0.25, 0.25, 0.25, 0.25, 2.0, -0.5, 0.0, 1.5]]
ADVANTAGES = {
    "group": (FULL, dict(reward_weights=[1.0, 0.25])),
    "batch": (FULL, dict(reward_weights=[1.0, 0.25], scale_rewards="batch")),
    "none": (FULL, dict(reward_weights=[1.0, 0.25], scale_rewards="none")),
    "group-default-weights": (FULL, dict()),
    "group-partial": (PARTIAL, dict(reward_weights=[0.5, 2.0])),
    "batch-partial": (PARTIAL, dict(reward_weights=[0.5, 2.0], scale_rewards="batch")),
    "none-partial": (PARTIAL, dict(reward_weights=[0.5, 2.0], scale_rewards="none")),
    "normalize_then_sum": (FULL, dict(reward_weights=[1.0, 0.25], multi_objective_aggregation="normalize_then_sum")),
    "normalize_then_sum-partial": (PARTIAL, dict(reward_weights=[0.5, 2.0],
                                                 multi_objective_aggregation="normalize_then_sum")),
}


def old_logps(options):
    """Log-probabilities near those of the policy, rounded so that the file holds exactly what TRL read."""
    with exact("float64"):
        trainer = build_trainer(trl, "GRPO", {**options, "mask_truncated_completions": False}, "float64")
        batch = score(trainer)
        seen = watch(trainer.model)
        trainer.compute_loss(trainer.model, batch)
    width = batch["completion_ids"].shape[1]
    now = seen["output"].log_probs.detach()[:, -width:]
    noise = torch.from_numpy(np.random.default_rng(32).normal(0, 0.25, now.shape))
    return torch.round((now + noise) * batch["completion_mask"], decimals=6)


def run(options, precision, old, splits=None, window=None):
    """Return the trainer, the loss, and batch and output of the last micro-batch. `splits`: the number of micro-batches
    of the generation batch; `window`: those of the accumulation window, at its start."""
    with exact(precision):
        splits = splits or 1
        trainer = build_trainer(trl, "GRPO", options, precision)
        seen = watch(trainer.model)
        batch = score(trainer)
        if old is not None:
            batch["old_per_token_logps"] = old.to(torch.get_default_dtype())
        micro = trl.trainer.utils.split_tensor_dict(batch, splits)
        loss = 0.0
        for inputs in micro[:window or splits]:
            part = trainer.compute_loss(trainer.model, inputs)
            part.backward()
            loss += part.item()
    return trainer, loss, batch, seen["output"]


def loss_cases():
    for name, options in {**ON_POLICY, **CASES}.items():
        old = None if name in ON_POLICY else old_logps(options)
        every = name in ALL_GRADIENTS
        trainer, loss, batch, output = run(options, "float64", old)
        plain_trainer, plain_loss, _, _ = run(options, "float32", old)
        grads = gradients(trainer.model, every)
        check(name, (loss, grads), (plain_loss, gradients(plain_trainer.model, every)))
        case = describe("grpo", name, options, "float64")
        if old is not None:
            case["inputs"]["old_token_logps"] = ragged(old, [abs(n) for n in COMPLETION_LENGTHS])
        case["expected"] = dict(
            loss=loss, advantages=batch["advantages"],
            num_items_in_batch=batch["num_items_in_batch"].item(),
            metrics=metrics_of(trainer, ("num_tokens",)),
            token_logps=completion_values(output.log_probs, batch),
            token_entropies=completion_values(output.entropy, batch),
            coefficients=completion_values(output.log_probs.grad, batch))
        if output.entropy.grad is not None:
            case["expected"]["entropy_coefficients"] = completion_values(output.entropy.grad, batch)
        if "ref_per_token_logps" in batch:
            case["expected"]["ref_token_logps"] = ragged(batch["ref_per_token_logps"],
                                                         [abs(n) for n in COMPLETION_LENGTHS])
        write_case(OUT / name, case, grads)


def advantage_cases():
    for name, (rewards, options) in ADVANTAGES.items():
        with exact("float64"):
            trainer = build_trainer(trl, "GRPO", options, "float64", rewards, names=("first", "second"))
            batch = score(trainer)
        case = describe("grpo", f"advantages-{name}", options, "float64")
        case["inputs"] = dict(rewards=rewards, names=["first", "second"])
        kept = {k: v for k, v in metrics_of(trainer).items() if "reward" in k}
        case["expected"] = dict(advantages=batch["advantages"], metrics=kept)
        write_case(OUT / f"advantages-{name}", case)
        print(f"  advantages-{name}:", [round(a, 3) for a in batch["advantages"].tolist()])


def accumulated():
    """Three micro-batches of four rows each. TRL's denominators are those of a micro-batch, or of the generation batch;
    ours are those of the accumulation window."""
    three = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    for name, options, window, ours_options in (
        # Mean over rows: equal for equal micro-batches.
        ("accumulated-grpo", dict(loss_type="grpo"), 3, dict(loss_type="grpo")),
        ("accumulated-bnpo", dict(loss_type="bnpo"), 3, dict(loss_type="bnpo")),
        ("accumulated-dapo", dict(), 3, dict()),
        ("accumulated-entropy_coef", dict(entropy_coef=0.3), 3, dict(entropy_coef=0.3)),
        ("accumulated-top_entropy_quantile", dict(top_entropy_quantile=0.3), 3, dict(top_entropy_quantile=0.3)),
        # One optimizer step takes the first micro-batch alone; TRL divides by a third of all tokens.
        ("steps_per_generation-dapo", dict(gradient_accumulation_steps=1, steps_per_generation=3), 1, None),
    ):
        old = old_logps({k: v for k, v in options.items() if "steps" not in k})
        trainer, theirs, _, _ = run({**three, **options}, "float64", old, splits=3, window=window)
        if ours_options is not None:
            ours_trainer, ours, _, _ = run(ours_options, "float64", old)
        else:
            # The tokens of the window itself: `bnpo` of TRL, whose window is this one micro-batch.
            ours_trainer, ours, _, _ = run({**three, **options, "loss_type": "bnpo"}, "float64", old, 3, 1)
        case = describe("grpo", name, options, "float64")
        case["inputs"]["old_token_logps"] = ragged(old, [abs(n) for n in COMPLETION_LENGTHS])
        case["inputs"]["micro_batches"] = [list(range(4 * i, 4 * i + 4)) for i in range(window)]
        case["expected"] = dict(trl=dict(loss=theirs), ours=dict(loss=ours))
        tensors = {f"trl.{k}": v for k, v in gradients(trainer.model).items()}
        tensors |= {f"ours.{k}": v for k, v in gradients(ours_trainer.model).items()}
        write_case(OUT / name, case, tensors)
        print(f"  {name}: TRL {theirs:.9f}, ours {ours:.9f}")


def adaptive_entropy():
    """Four optimizer steps on one batch without an update: the coefficient that each step applied and the next one."""
    options = dict(use_adaptive_entropy=True, entropy_coef=0.02, entropy_coef_delta=0.005, entropy_coef_max=0.03,
                   entropy_target=3.0)
    with exact("float64"):
        for name, target in (("adaptive-entropy-below-target", 5.0), ("adaptive-entropy-above-target", 1.0)):
            options["entropy_target"] = target
            old = old_logps({})
            trainer = build_trainer(trl, "GRPO", options, "float64")
            batch = score(trainer)
            batch["old_per_token_logps"] = old.to(torch.get_default_dtype())
            losses, coefficients = [], []
            for _ in range(4):
                losses.append(trainer.compute_loss(trainer.model, batch).item())
                coefficients.append(trainer.entropy_coef)
            case = describe("grpo", name, dict(options), "float64")
            case["inputs"]["old_token_logps"] = ragged(old, [abs(n) for n in COMPLETION_LENGTHS])
            case["expected"] = dict(losses=losses, entropy_coef_after=coefficients,
                                    metrics=metrics_of(trainer, ("num_tokens",)))
            write_case(OUT / name, case)
            print(f"  {name}:", losses, coefficients)


if __name__ == "__main__":
    assert trl.__version__ == "1.16.0", trl.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    loss_cases()
    advantage_cases()
    accumulated()
    adaptive_entropy()
