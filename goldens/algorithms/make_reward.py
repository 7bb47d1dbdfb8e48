"""Write reward/<case>/: what TRL's RewardTrainer computes on one batch of six ragged pairs.

    python make_reward.py
"""

from common import *
import trl
from datasets import Dataset

OUT = HERE / "reward"
LENGTHS = [(7, 12), (1, 3), (20, 5), (9, 9), (2, 31), (16, 15)]
MARGINS = [0.5, 0.0, 2.25, -1.0, 0.125, 1.5]  # exact in float32, in which TRL keeps them
CASES = {
    "plain": dict(),
    "margin": dict(margin=True),
    "centered": dict(center_rewards_coefficient=0.01),
    "margin-centered": dict(margin=True, center_rewards_coefficient=0.25),
}


def pairs():
    rng = np.random.default_rng(21)
    return [dict(chosen_ids=random_ids(rng, c - 1) + [EOS], rejected_ids=random_ids(rng, r - 1) + [EOS])
            for c, r in LENGTHS]


def run(options, precision, rows, batches, words=None):
    options = dict(options)
    if options.pop("margin", False):
        rows = [dict(row, margin=m) for row, m in zip(rows, MARGINS, strict=True)]
    with exact(precision):
        trainer = trl.RewardTrainer(
            load("reward", precision), processing_class=words or tokenizer(), train_dataset=Dataset.from_list(rows),
            args=trl.RewardConfig(**quiet(per_device_train_batch_size=len(rows), max_length=None, **options)))
        seen = watch(trainer.model)
        trainer.model.train()
        loss = 0.0
        for indices in batches:
            batch = trainer.data_collator([trainer.train_dataset[i] for i in indices])
            part = trainer.compute_loss(trainer.model, batch) / len(batches)
            part.backward()
            loss += part.item()
    return trainer, loss, seen["output"].logits


def describe(name, options, rows):
    options = dict(options)
    inputs = dict(pairs=rows)
    if options.pop("margin", False):
        inputs["margins"] = MARGINS
    return dict(algorithm="reward", case=name, source="trl 1.16.0", precision="float64",
                models=dict(reward="../../models/reward"), options=options, inputs=inputs)


def main():
    assert trl.__version__ == "1.16.0", trl.__version__
    shutil.rmtree(OUT, ignore_errors=True)
    rows = pairs()
    whole = [list(range(len(rows)))]
    for name, options in CASES.items():
        trainer, loss, rewards = run(options, "float64", rows, whole)
        plain_trainer, plain_loss, _ = run(options, "float32", rows, whole)
        every = name == "margin-centered"
        grads = gradients(trainer.model, every) | {"grad.score.weight": trainer.model.score.weight.grad}
        grads32 = gradients(plain_trainer.model, every) | {"grad.score.weight": plain_trainer.model.score.weight.grad}
        check(name, (loss, grads), (plain_loss, grads32))
        chosen, rejected = rewards.squeeze(-1).chunk(2)
        chosen_grad, rejected_grad = rewards.grad.squeeze(-1).chunk(2)
        case = describe(name, options, rows)
        case["expected"] = dict(loss=loss, rewards=dict(chosen=chosen, rejected=rejected),
                                coefficients=dict(chosen=chosen_grad, rejected=rejected_grad),
                                metrics=metrics_of(trainer))
        write_case(OUT / name, case, grads)

    # Four pairs, then two: TRL averages the two means, ours divides by the six pairs of the step.
    batches, options = [[0, 1, 2, 3], [4, 5]], CASES["margin-centered"]
    trainer, theirs, _ = run(options, "float64", rows, batches)
    ours_trainer, ours, _ = run(options, "float64", rows, whole)
    case = describe("accumulated", options, rows)
    case["inputs"]["micro_batches"] = batches
    case["expected"] = dict(trl=dict(loss=theirs, metrics_of_last_micro_batch=metrics_of(trainer)),
                            ours=dict(loss=ours, metrics=metrics_of(ours_trainer)))
    write_case(OUT / "accumulated", case, {f"trl.{k}": v for k, v in gradients(trainer.model).items()}
               | {f"ours.{k}": v for k, v in gradients(ours_trainer.model).items()})
    print(f"  accumulated: TRL {theirs:.9f}, ours {ours:.9f}")

    # A tokenizer without a pad token: TRL pads with the end token, and transformers then reads the score at the last
    # token that is not the end token. Ours reads it at the last token.
    words = tokenizer()
    words.pad_token = "<eos>"
    _, theirs, rewards = run({}, "float64", rows, whole, words)
    case = describe("pad-is-eos", {}, rows)
    plain_case = json.loads((OUT / "plain" / "case.json").read_text())["expected"]
    chosen, rejected = rewards.squeeze(-1).chunk(2)
    case["expected"] = dict(trl=dict(loss=theirs, rewards=dict(chosen=chosen, rejected=rejected)),
                            ours={k: plain_case[k] for k in ("loss", "rewards")})
    write_case(OUT / "pad-is-eos", case)
    print(f"  pad-is-eos: TRL {theirs:.9f}, ours {plain_case['loss']}")


if __name__ == "__main__":
    main()
