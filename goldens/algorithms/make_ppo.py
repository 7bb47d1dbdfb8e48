"""Write ppo/<case>/: what TRL 1.12's PPOTrainer computes on fixed completions of eight prompts. Later releases have
no PPO.

    PYTHONPATH=trl112 python make_ppo.py

`train()` runs as it is, for one batch, with plain SGD. Replaced: sampling (the completions are given), the shuffling of
prompts and of mini-batches, and the optimizer. The numbers are read from train()'s own variables, where it whitens the
advantages and where it takes a step.
"""

from common import *
import trl
from datasets import Dataset
from trl.experimental.ppo import PPOConfig, PPOTrainer
import trl.experimental.ppo.ppo_trainer as ppo

OUT = HERE / "ppo"
RESPONSE = 9
PROMPT_LENGTHS = [4, 1, 7, 3, 5, 2, 6, 4]
# Completion lengths with the end token; a negative one fills the response without it.
COMPLETION_LENGTHS = [5, 9, -9, 1, 3, 8, -9, 6]
LEARNING_RATE = 0.01
CASES = {
    "k1": dict(kl_estimator="k1"),
    "k3": dict(kl_estimator="k3"),
    "missing_eos_penalty": dict(missing_eos_penalty=1.5),
    "whiten_rewards": dict(whiten_rewards=True),
    "gamma-lam-temperature": dict(gamma=0.9, lam=0.8, temperature=1.0, kl_coef=0.2),
    "clipped": dict(cliprange=0.02, cliprange_value=0.01, vf_coef=0.5, num_ppo_epochs=3),
    "no-stop-token": dict(stop_token=None),
}
ALL_GRADIENTS = {"missing_eos_penalty"}


def rollouts():
    rng = np.random.default_rng(41)
    prompts = [random_ids(rng, n) for n in PROMPT_LENGTHS]
    completions = [random_ids(rng, -n) if n < 0 else random_ids(rng, n - 1) + [EOS] for n in COMPLETION_LENGTHS]
    return prompts, completions


def frame_of_train():
    frame = sys._getframe(2)
    while frame.f_code.co_name != "train":
        frame = frame.f_back
    return frame.f_locals


class RecordingSGD(torch.optim.SGD):
    """Plain SGD that keeps the gradients of each step."""

    def step(self, closure=None):
        found = frame_of_train()
        names = ("loss", "pg_loss", "vf_loss", "vf_clipfrac")
        self.steps.append(dict(
            scalars={k: found[k].item() for k in names},
            new_logprobs=found["new_logprobs"].detach().clone(), vpred=found["vpred"].detach().clone(),
            logprob_grad=self.seen["logprobs"].grad.clone(), value_grad=self.seen["values"].grad.clone(),
            policy={n: p.grad.clone() for n, p in self.models[0].named_parameters()},
            value={n: p.grad.clone() for n, p in self.models[1].named_parameters()}))
        return super().step(closure)


def run(options, precision, last_batch=False):
    """Return what train() held: a dictionary of its variables, the steps, its metrics, and both models. In the last
    batch of the data set, accelerate lets every micro-batch take a step; so another batch follows, which is not used.
    """
    prompts, completions = rollouts()
    options = {**dict(stop_token="eos", num_ppo_epochs=2, per_device_train_batch_size=len(prompts)), **options}
    held, logged = {}, {}
    with exact(precision), patches() as patch:
        policy, value = load("policy", precision), load("value", precision)
        optimizer = RecordingSGD([*policy.parameters(), *value.parameters()], lr=LEARNING_RATE)
        optimizer.steps, optimizer.seen, optimizer.models = [], {}, (policy, value)

        def generation(model, queries, _batch, pad, _config):
            rows = [next(c for p, c in zip(prompts, completions) if p == [i for i in q if i != pad])
                    for q in queries.tolist()]
            if options["stop_token"] is None:  # the policy then goes on after the end token
                rng = np.random.default_rng(42)
                rows = [r + random_ids(rng, RESPONSE - len(r)) for r in rows]
            tokens = torch.tensor([r + [pad] * (RESPONSE - len(r)) for r in rows])
            both = torch.cat([queries, tokens], 1)
            logits = ppo.forward(model, both, pad).logits[:, queries.shape[1] - 1:-1]
            return both, logits / (trainer.args.temperature + 1e-7)

        def whiten(values, mask, shift_mean=True):
            found = frame_of_train()
            out = theirs(values, mask, shift_mean)
            if shift_mean:
                held.update({k: v.clone() for k, v in found.items() if isinstance(v, torch.Tensor)})
                held["whitened"] = out.masked_fill(~mask, 0)
            else:
                held["raw_rewards"] = values.clone()
            return out

        def log_softmax(logits, ids):
            out = their_log_softmax(logits, ids)
            if out.requires_grad:
                out.retain_grad()
                optimizer.seen["logprobs"] = out
            return out

        def keep_values(_module, _args, output):
            if output[1].requires_grad:
                output[1].retain_grad()
                optimizer.seen["values"] = output[1]

        theirs, their_log_softmax, loader = ppo.masked_whiten, ppo.selective_log_softmax, ppo.DataLoader
        patch(ppo, "batch_generation", generation)
        patch(ppo, "masked_whiten", whiten)
        patch(ppo, "selective_log_softmax", log_softmax)
        patch(ppo, "DataLoader", lambda *a, **k: loader(*a, **{**k, "shuffle": False}))
        patch(ppo.np.random, "permutation", np.arange)
        data = Dataset.from_list([dict(input_ids=p) for p in prompts] * (1 if last_batch else 2))
        trainer = PPOTrainer(
            PPOConfig(**quiet(total_episodes=len(prompts), response_length=RESPONSE, num_sample_generations=0,
                              local_rollout_forward_batch_size=len(prompts), **options)),
            tokenizer("left"), policy, load("reference", precision), load("reward", precision), data, value,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)))
        trainer.accelerator.print = lambda *_: None
        trainer.log = logged.update
        trainer.model.register_forward_hook(keep_values)
        trainer.train()
    return held, optimizer.steps, logged, (policy, value)


@contextlib.contextmanager
def patches():
    undo = []

    def patch(owner, name, value):
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        yield patch
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)


def named(steps, every):
    """Gradients of all steps: step<i>.<model>.grad.<name>."""
    out = {}
    for i, step in enumerate(steps):
        for model in ("policy", "value"):
            keep = SOME_TENSORS + (("score.weight",) if model == "value" else ())
            out |= {f"step{i}.{model}.grad.{n}": g for n, g in step[model].items() if every and i == 0 or n in keep}
    return out


def describe(name, options):
    prompts, completions = rollouts()
    defaults = dict(temperature=0.7, kl_coef=0.05, kl_estimator="k1", cliprange=0.2, vf_coef=0.1, cliprange_value=0.2,
                    gamma=1.0, lam=0.95, whiten_rewards=False, missing_eos_penalty=None, num_ppo_epochs=2,
                    num_mini_batches=1, gradient_accumulation_steps=1, response_length=RESPONSE, stop_token="eos")
    return dict(algorithm="ppo", case=name, source="trl 1.12.0", precision="float64",
                models={m: f"../../models/{m}" for m in MODELS},
                optimizer=dict(name="sgd", learning_rate=LEARNING_RATE),
                options={**defaults, **options}, inputs=dict(prompt_ids=prompts, completion_ids=completions))


def expected(held, steps, logged):
    """Rows are cut to the tokens that count: n tokens of the completion, and n + 1 values where there is room."""
    width = held["responses"].shape[1]
    tokens = (~held["padding_mask"]).sum(1).tolist()
    values = (~held["padding_mask_p1"]).sum(1).tolist()
    start = steps[0]["value_grad"].shape[1] - width - 1
    out = dict(
        tokens=tokens, values=values, scores=held["scores"],
        token_logps=ragged(held["logprobs"], tokens), ref_token_logps=ragged(held["ref_logprobs"], tokens),
        token_values=ragged(held["values"], values), token_kl=ragged(held["kl"], tokens),
        token_rewards=ragged(held["rewards"], values), returns=ragged(held["returns"], values),
        raw_advantages=ragged(held["advantages"], tokens), advantages=ragged(held["whitened"], tokens),
        steps=[dict(**s["scalars"], new_token_logps=ragged(s["new_logprobs"], tokens),
                    new_token_values=ragged(s["vpred"], values),
                    coefficients=ragged(s["logprob_grad"], tokens),
                    value_coefficients=ragged(s["value_grad"][:, start:-1, 0], values)) for s in steps],
        metrics={k: v for k, v in logged.items() if k not in ("eps", "lr", "episode")})
    if "raw_rewards" in held:
        out["token_rewards_before_whitening"] = ragged(held["raw_rewards"], values)
    return out


def main():
    assert trl.__version__ == "1.12.0", trl.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    for name, options in CASES.items():
        held, steps, logged, models = run(options, "float64")
        _, plain_steps, _, _ = run(options, "float32")
        every = name in ALL_GRADIENTS
        grads = named(steps, every)
        for i, step in enumerate(steps):
            mine = {k: v for k, v in grads.items() if k.startswith(f"step{i}.")}
            theirs = named(plain_steps, every)
            check(f"{name}, step {i}", (step["scalars"]["loss"], mine),
                  (plain_steps[i]["scalars"]["loss"], theirs), 1e-5, 3e-4)
        final = {f"final.{m}.{n}": p for m, model in zip(("policy", "value"), models)
                 for n, p in model.named_parameters() if n in SOME_TENSORS + ("score.weight",)}
        case = describe(name, options)
        case["expected"] = expected(held, steps, logged)
        case["inputs"]["completion_ids"] = ragged(held["responses"], case["expected"]["tokens"])
        write_case(OUT / name, case, grads | final)
        print("   ", {k: round(v, 4) for k, v in logged.items() if "clipfrac" in k or "ratio" in k or "kl" in k})

    # Two micro-batches of four prompts. TRL averages their means; ours divides by the tokens of the mini-batch.
    _, theirs, logged, _ = run(
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_ppo_epochs=1), "float64")
    _, ours, _, _ = run(dict(num_ppo_epochs=1), "float64")
    assert len(theirs) == len(ours) == 1
    case = describe("accumulated", dict(gradient_accumulation_steps=2, num_ppo_epochs=1))
    case["inputs"]["micro_batches"] = [[0, 1, 2, 3], [4, 5, 6, 7]]
    case["expected"] = dict(trl=dict(pg_loss=logged["loss/policy_avg"], vf_loss=logged["loss/value_avg"]),
                            ours=ours[0]["scalars"])
    write_case(OUT / "accumulated", case, {f"trl.{k}": v for k, v in named(theirs, False).items()}
               | {f"ours.{k}": v for k, v in named(ours, False).items()})

    # The number of optimizer steps of one epoch over a batch of 8, for the README.
    for minis in (1, 2):
        for accumulation in (1, 2, 4):
            for last in (False, True):
                _, steps, _, _ = run(dict(num_mini_batches=minis, gradient_accumulation_steps=accumulation,
                                          num_ppo_epochs=1, per_device_train_batch_size=8 // accumulation),
                                     "float32", last)
                print(f"  num_mini_batches {minis}, gradient_accumulation_steps {accumulation}, "
                      f"last batch of the data {last}: {len(steps)} steps")


if __name__ == "__main__":
    main()
