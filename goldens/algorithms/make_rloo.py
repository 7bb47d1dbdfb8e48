"""Write rloo/<case>/: what TRL's RLOOTrainer computes on the rollouts of rollouts.py.

    python make_rloo.py

The KL penalty is part of the reward: it uses the log-probabilities at generation, which TRL computes with the policy.
`old_logps` are given numbers near the policy's own sums, so that ratios differ from 1 and clipping is active.
"""

from rollouts import *
import trl

OUT = HERE / "rloo"
PARTIAL = [[1.0, None, 1.5, 2.0, None, None, 0.75, None, 0.25, 0.25, 0.25, 0.25],
           [0.5, None, None, -1.0, None, None, None, None, 1.0, 1.0, 1.0, 1.0]]
TWO = dict(reward_weights=[0.5, 2.0])
LENGTHS = [abs(n) for n in COMPLETION_LENGTHS]
# Options, rewards (None: REWARDS alone), whether old log-probabilities are given.
CASES = {
    "on-policy": (dict(), None, False),
    "on-policy-beta-0": (dict(beta=0.0), None, False),
    "default": (dict(), None, True),
    "beta-0": (dict(beta=0.0), None, True),
    "beta-0.3": (dict(beta=0.3), None, True),
    "epsilon_high": (dict(epsilon=0.1, epsilon_high=0.3), None, True),
    "normalize_advantages": (dict(normalize_advantages=True), None, True),
    "reward_clip_range": (dict(reward_clip_range=(-0.5, 1.25)), None, True),
    "mask_truncated": (dict(mask_truncated_completions=True, beta=0.3), None, True),
    "temperature": (dict(temperature=0.7), None, True),
    "partial": (dict(**TWO), PARTIAL, True),
    "partial-normalize_advantages": (dict(normalize_advantages=True, beta=0.0, **TWO), PARTIAL, True),
}


def run(options, rewards, precision, old):
    with exact(precision):
        names = ("score",) if rewards is None else ("first", "second")
        trainer = build_trainer(trl, "RLOO", options, precision, rewards, names)
        inside = {}
        method = trainer._get_per_token_logps_and_entropies

        def record(*args, **kwargs):
            out = method(*args, **kwargs)
            inside.setdefault("logps", []).append(out[0].detach())
            return out

        trainer._get_per_token_logps_and_entropies = record
        batch = score(trainer)
        seen = watch(trainer.model)
        if old is not None:
            batch["old_logps"] = old.to(torch.get_default_dtype())
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    return trainer, loss.item(), batch, seen["output"], inside["logps"]


def main():
    assert trl.__version__ == "1.16.0", trl.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    for name, (options, rewards, given) in CASES.items():
        old = None
        if given:
            batch = run(options, rewards, "float64", None)[2]
            noise = torch.from_numpy(np.random.default_rng(33).normal(0, 0.3, len(LENGTHS)))
            old = torch.round(batch["old_logps"] + noise, decimals=6)
        trainer, loss, batch, output, logps = run(options, rewards, "float64", old)
        plain_trainer, plain_loss, _, _, _ = run(options, rewards, "float32", old)
        grads = gradients(trainer.model)
        check(name, (loss, grads), (plain_loss, gradients(plain_trainer.model)), loss_tolerance=2e-5)
        case = describe("rloo", name, options, "float64")
        if rewards is not None:
            case["inputs"] |= dict(rewards=rewards, names=["first", "second"])
        if old is not None:
            case["inputs"]["old_logps"] = old
        case["expected"] = dict(loss=loss, advantages=batch["advantages"], metrics=metrics_of(trainer, ("num_tokens",)),
                                token_logps=completion_values(output.log_probs, batch),
                                coefficients=completion_values(output.log_probs.grad, batch))
        if trainer.beta != 0.0:
            # The second call of the rollout is the reference's.
            case["expected"]["ref_token_logps"] = ragged(logps[1] * batch["completion_mask"], LENGTHS)
        write_case(OUT / name, case, grads)


if __name__ == "__main__":
    main()
