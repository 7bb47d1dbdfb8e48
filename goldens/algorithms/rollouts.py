"""What make_grpo.py and make_rloo.py share: fixed rollouts, and a trainer that uses them instead of generating."""

from common import *
from datasets import Dataset

GENERATIONS, MAX_COMPLETION = 4, 10
PROMPT_LENGTHS = [6, 1, 9]
# Completion lengths; a negative one is cut off at the limit, without the end token.
COMPLETION_LENGTHS = [4, 9, 1, -10, 10, 7, -10, 3, 6, 2, 8, 5]
# Exact in float32, in which TRL keeps rewards.
REWARDS = [1.0, -0.5, 0.25, 2.0, 0.0, 1.5, -1.0, 0.75, -0.25, 0.5, 3.0, -2.0]


def rollouts():
    rng = np.random.default_rng(31)
    prompts = [random_ids(rng, n) for n in PROMPT_LENGTHS]
    completions = [random_ids(rng, -n) if n < 0 else random_ids(rng, n - 1) + [EOS] for n in COMPLETION_LENGTHS]
    return [prompts[i // GENERATIONS] for i in range(len(completions))], completions


def build_trainer(trl, kind, options, precision, rewards=None, names=("score",)):
    """Return a trainer whose rollouts and rewards are fixed. `rewards`: one list per reward function, None included."""
    module = getattr(trl.trainer, f"{kind.lower()}_trainer")
    prompts, completions = rollouts()
    rewards = rewards or [REWARDS]

    def function(name, values):
        def score(**_):
            return values
        score.__name__ = name
        return score

    settings = dict(num_generations=GENERATIONS, max_completion_length=MAX_COMPLETION,
                    per_device_train_batch_size=len(completions))
    args = getattr(trl, f"{kind}Config")(**quiet(**{**settings, **options}))
    theirs, module.create_model_from_path = module.create_model_from_path, lambda *_, **__: load("reference", precision)
    try:
        trainer = getattr(trl, f"{kind}Trainer")(
            load("policy", precision), [function(n, v) for n, v in zip(names, rewards, strict=True)], args=args,
            train_dataset=Dataset.from_list([dict(prompt=text(p)) for p in prompts]), processing_class=tokenizer())
    finally:
        module.create_model_from_path = theirs

    # Only sampling is replaced; the rest of `_generate` (its metrics, too) is TRL's.
    trainer._generate_single_turn = lambda *_, **__: (completions, None) if kind == "GRPO" else completions
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def score(trainer):
    """TRL's batch: padded tokens and masks, advantages, log-probabilities of the reference."""
    return trainer._generate_and_score_completions([dict(prompt=text(p)) for p in rollouts()[0]])


def completion_values(values, batch):
    """The completion's part of each row: [B, P + C - 1] -> ragged, one number per completion token."""
    width = batch["completion_ids"].shape[1]
    return ragged(values[:, -width:], [abs(n) for n in COMPLETION_LENGTHS])


def describe(kind, name, options, precision, source="trl 1.16.0"):
    prompts, completions = rollouts()
    settings = dict(num_generations=GENERATIONS, max_completion_length=MAX_COMPLETION)
    return dict(algorithm=kind, case=name, source=source, precision=precision,
                models=dict(policy="../../models/policy", reference="../../models/reference"),
                options={**settings, **options},
                inputs=dict(prompt_ids=prompts[::GENERATIONS], completion_ids=completions, rewards=[REWARDS]))
