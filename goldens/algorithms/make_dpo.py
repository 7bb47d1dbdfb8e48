"""Write dpo/<case>/: what TRL's DPOTrainer computes on one batch of five ragged pairs.

    python make_dpo.py

See README.md for the layout. The cases `cdpo` and `weighted-hinge` are ours: TRL 1.16 does not compute them.
"""

from common import *
import torch.nn.functional as F
import trl
from datasets import Dataset

OUT = HERE / "dpo"
# Prompt, chosen and rejected lengths; the last token of each completion is the end token. The rejected completion of
# the second pair is the end token alone, and in the fourth pair both completions have one length.
LENGTHS = [(5, 7, 11), (2, 9, 1), (9, 3, 6), (1, 5, 5), (6, 13, 2)]
# `aot` sorts; with completions of equal length the orders under policy and reference differ.
EQUAL_LENGTHS = [(5, 4, 4), (2, 4, 4), (3, 4, 4), (1, 4, 4), (6, 4, 4)]
ALL_GRADIENTS = {"sigmoid", "mixed"}
BETA = 0.4
CASES = {
    "default": dict(),
    "sigmoid": dict(beta=BETA),
    "hinge": dict(beta=BETA, loss_type=["hinge"]),
    "ipo": dict(beta=BETA, loss_type=["ipo"]),
    "exo_pair": dict(beta=BETA, loss_type=["exo_pair"], label_smoothing=1e-3),
    "exo_pair-smoothing-0.2": dict(beta=BETA, loss_type=["exo_pair"], label_smoothing=0.2),
    "nca_pair": dict(beta=BETA, loss_type=["nca_pair"]),
    "robust": dict(beta=BETA, loss_type=["robust"]),
    "robust-smoothing-0.1": dict(beta=BETA, loss_type=["robust"], label_smoothing=0.1),
    "bco_pair": dict(beta=BETA, loss_type=["bco_pair"]),
    "sppo_hard": dict(beta=BETA, loss_type=["sppo_hard"]),
    "aot": dict(beta=BETA, loss_type=["aot"]),
    "aot-smoothing-0.1": dict(beta=BETA, loss_type=["aot"], label_smoothing=0.1),
    "aot_unpaired": dict(beta=BETA, loss_type=["aot_unpaired"]),
    "aot_unpaired-smoothing-0.1": dict(beta=BETA, loss_type=["aot_unpaired"], label_smoothing=0.1),
    "apo_zero": dict(beta=BETA, loss_type=["apo_zero"]),
    "apo_down": dict(beta=BETA, loss_type=["apo_down"]),
    "discopop": dict(beta=BETA, loss_type=["discopop"]),
    "discopop-tau-0.5": dict(beta=BETA, loss_type=["discopop"], discopop_tau=0.5),
    "sft": dict(loss_type=["sft"]),
    "sigmoid_norm": dict(beta=2.0, loss_type=["sigmoid_norm"]),
    # TRL ignores label_smoothing here: loss and gradients are those of `sigmoid`.
    "sigmoid-smoothing-ignored": dict(beta=BETA, label_smoothing=0.1),
    "ld_alpha-0.3": dict(beta=BETA, ld_alpha=0.3),
    "ld_alpha-0": dict(beta=BETA, ld_alpha=0.0),
    "ld_alpha-0.3-ipo": dict(beta=BETA, ld_alpha=0.3, loss_type=["ipo"]),
    "weighted": dict(beta=BETA, use_weighting=True),
    "weighted-ipo": dict(beta=BETA, use_weighting=True, loss_type=["ipo"]),
    "weighted-discopop": dict(beta=BETA, use_weighting=True, loss_type=["discopop"]),
    "mixed": dict(beta=BETA, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "mixed-weighted": dict(beta=BETA, loss_type=["sigmoid", "ipo", "nca_pair"],
                           loss_weights=[0.5, 0.3, 0.7], use_weighting=True),
    "mixed-no-weights": dict(beta=BETA, loss_type=["hinge", "sft"]),
    "truncated": dict(beta=BETA, max_length=12),
}
F_DIVERGENCES = {"forward_kl": {}, "js_divergence": {}, "alpha_divergence": {}}
# All losses that accept an f-divergence, but `sft`, which does not use the scores.
F_LOSSES = {"sigmoid": {}, "sigmoid_norm": dict(beta=2.0), "hinge": {}, "ipo": {},
            "exo_pair": dict(label_smoothing=0.2), "robust": dict(label_smoothing=0.1), "discopop": {}}
for divergence in F_DIVERGENCES:
    for loss_type, extra in F_LOSSES.items():
        CASES[f"{loss_type}-{divergence}"] = {
            **dict(beta=BETA, loss_type=[loss_type], f_divergence_type=divergence), **extra}
CASES["sigmoid-alpha_divergence-0.8"] = dict(beta=BETA, f_divergence_type="alpha_divergence",
                                             f_alpha_divergence_coef=0.8)
CASES["sigmoid-alpha_divergence-1"] = dict(beta=BETA, f_divergence_type="alpha_divergence",
                                           f_alpha_divergence_coef=1.0)


def pairs(lengths=LENGTHS):
    rng = np.random.default_rng(11)
    return [dict(prompt_ids=random_ids(rng, p), chosen_ids=random_ids(rng, c - 1) + [EOS],
                 rejected_ids=random_ids(rng, r - 1) + [EOS]) for p, c, r in lengths]


def trainer_of(options, precision, rows):
    data = Dataset.from_list([dict(prompt=text(r["prompt_ids"]), chosen=" " + text(r["chosen_ids"]),
                                   rejected=" " + text(r["rejected_ids"])) for r in rows])
    args = trl.DPOConfig(**quiet(per_device_train_batch_size=len(rows), **{"max_length": None, **options}))
    trainer = trl.DPOTrainer(load("policy", precision), load("reference", precision), args=args, train_dataset=data,
                             processing_class=tokenizer())
    for row, ours in zip(trainer.train_dataset, rows, strict=True):
        assert {k: row[k] for k in ours} == ours
    trainer.model.train()
    return trainer


def run(options, precision, rows, batches=None):
    """Return the trainer, the loss and what each micro-batch computed. `batches`: the rows of each micro-batch."""
    with exact(precision):
        trainer = trainer_of(options, precision, rows)
        policy, reference = watch(trainer.model), watch(trainer.ref_model)
        loss, parts = 0.0, []
        batches = batches or [list(range(len(rows)))]
        for indices in batches:
            batch = trainer.data_collator([trainer.train_dataset[i] for i in indices])
            part = trainer.compute_loss(trainer.model, batch) / len(batches)
            part.backward()
            loss += part.item()
            parts.append((batch, policy["output"], reference["output"]))
    return trainer, loss, parts


def by_side(values, mask):
    """Split rows into chosen and rejected, and keep the completion's tokens of each."""
    rows = [row[m.bool()] for row, m in zip(values.detach(), mask)]
    half = len(rows) // 2
    return dict(chosen=rows[:half], rejected=rows[half:])


def describe(name, options, precision, rows, source="trl 1.16.0"):
    return dict(algorithm="dpo", case=name, source=source, precision=precision,
                models=dict(policy="../../models/policy", reference="../../models/reference"),
                options={**dict(loss_type=["sigmoid"], beta=0.1, max_length=None), **options}, inputs=dict(pairs=rows))


def expected(trainer, loss, part, options):
    batch, policy, reference = part
    mask = batch["completion_mask"][:, 1:]
    logps, ref = policy.log_probs.detach(), reference.log_probs.detach()
    out = dict(loss=loss, metrics=metrics_of(trainer, ("num_tokens",)),
               token_logps=by_side(logps, mask), ref_token_logps=by_side(ref, mask),
               coefficients=by_side(policy.log_probs.grad, mask))
    if options.get("use_weighting"):
        out["token_log_sum_sq_probs"] = by_side(policy.log_sum_sq_probs, mask)
    # Sums as the loss uses them: with ld_alpha, the tokens beyond the shorter completion count less.
    weight = torch.ones_like(logps)
    if options.get("ld_alpha") is not None:
        lengths = mask.sum(1)
        shared = torch.minimum(*lengths.chunk(2)).repeat(2)
        weight = torch.where(mask.cumsum(1) > shared[:, None], options["ld_alpha"], 1.0).to(logps)
    for key, values in (("logps", logps), ("ref_logps", ref)):
        chosen, rejected = (values * mask * weight).sum(1).chunk(2)
        out[key] = dict(chosen=chosen, rejected=rejected)
    return out


def trl_cases():
    for name, options in CASES.items():
        rows = pairs(EQUAL_LENGTHS if name.startswith("aot") else LENGTHS)
        # TRL's table of clamps for the alpha divergence has no float64.
        alpha = options.get("f_divergence_type") == "alpha_divergence" and options.get("f_alpha_divergence_coef") != 1.0
        precision = "float32" if alpha else "float64"
        trainer, loss, parts = run(options, precision, rows)
        plain_trainer, plain_loss, _ = run(options, "float32", rows)
        grads = gradients(trainer.model, name in ALL_GRADIENTS)
        check(name, (loss, grads), (plain_loss, gradients(plain_trainer.model, name in ALL_GRADIENTS)))
        case = describe(name, options, precision, rows)
        case["expected"] = expected(trainer, loss, parts[0], options)
        write_case(OUT / name, case, grads)


def our_cases(rows, smoothing=0.1):
    """Losses that TRL does not compute, by autograd on its log-probabilities in float64."""

    def cdpo(l, _weight):
        return (-(1 - smoothing) * F.logsigmoid(l) - smoothing * F.logsigmoid(-l)).mean()

    def weighted_hinge(l, weight):
        return (weight * torch.relu(1 - l)).mean()

    for name, options, loss_of in (
        ("cdpo", dict(beta=BETA, loss_type=["cdpo"], label_smoothing=smoothing), cdpo),
        ("weighted-hinge", dict(beta=BETA, loss_type=["hinge"], use_weighting=True), weighted_hinge),
    ):
        trained = {**options, "loss_type": ["sigmoid"]}
        trainer, _, [(batch, _, reference)] = run(trained, "float64", rows)
        trainer.model.zero_grad()
        with exact("float64"):
            seen = watch(trainer.model)
            trainer.compute_loss(trainer.model, batch)
        policy = seen["output"]
        mask = batch["completion_mask"][:, 1:]
        chosen, rejected = ((policy.log_probs - reference.log_probs) * mask).sum(1).chunk(2)
        weight = None
        if options.get("use_weighting"):
            aligned = ((policy.log_probs - policy.log_sum_sq_probs) * mask).detach().sum(1) / mask.sum(1)
            weight = aligned.exp().chunk(2)[0] * aligned.exp().chunk(2)[1]
        loss = loss_of(BETA * (chosen - rejected), weight)
        loss.backward()
        case = describe(name, options, "float64", rows, source="ours")
        case["expected"] = expected(trainer, loss.item(), (batch, policy, reference), options)
        write_case(OUT / name, case, gradients(trainer.model))
        print(f"  {name} (ours): loss {loss.item():.9f}")


def refused_weightings(rows):
    """Print the losses that fail in TRL together with use_weighting, for the README."""
    for loss_type in ("sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero "
                      "apo_down discopop sft sigmoid_norm").split():
        try:
            run(dict(loss_type=[loss_type], use_weighting=True, label_smoothing=0.1), "float32", rows)
        except (RuntimeError, NotImplementedError) as error:
            print(f"  use_weighting with {loss_type} fails in TRL: {str(error)[:90]}")


def accumulated():
    """Two micro-batches of 3 and 2 pairs. TRL averages the micro-batches' means; ours divides by what the whole step
    holds: pairs, and for `sft` tokens of the chosen completions."""
    for name, options in {
        "accumulated-sigmoid": dict(beta=BETA),
        "accumulated-sft": dict(loss_type=["sft"]),
        "accumulated-aot": dict(beta=BETA, loss_type=["aot"]),
    }.items():
        batches = [[0, 1, 2], [3, 4]]
        rows = pairs(EQUAL_LENGTHS if name.endswith("aot") else LENGTHS)
        trainer, theirs, _ = run(options, "float64", rows, batches)
        whole, ours, _ = run(options, "float64", rows)
        case = describe(name, options, "float64", rows)
        case["inputs"]["micro_batches"] = batches
        case["expected"] = dict(trl=dict(loss=theirs), ours=dict(loss=ours))
        tensors = {f"trl.{k}": v for k, v in gradients(trainer.model).items()}
        tensors |= {f"ours.{k}": v for k, v in gradients(whole.model).items()}
        write_case(OUT / name, case, tensors)
        print(f"  {name}: TRL {theirs:.9f}, ours {ours:.9f}")


if __name__ == "__main__":
    assert trl.__version__ == "1.16.0", trl.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    trl_cases()
    our_cases(pairs())
    refused_weightings(pairs())
    accumulated()
