"""Train with TRL as its users do: reward model, DPO, GRPO or PPO, f32, on the CPU.

    python peer.py ALGORITHM FOLDER STEPS THREADS

FOLDER is what run.py prepared: the models `policy`, `reward` and `value`, and `rows.jsonl`. Prints one JSON line: the
seconds of every step (from one step's end to the next: data loading and optimizer included, set-up not), the seconds of
its phases, and the last loss. PPO needs TRL 1.12 on PYTHONPATH, the last release that has it.
"""

import copy
import json
import os
import sys
import tempfile
import time

ALGORITHM, FOLDER, STEPS, THREADS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.environ.update(OMP_NUM_THREADS=str(THREADS), CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TQDM_DISABLE="1",
                  TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import trl
from datasets import Dataset
from transformers import (AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification, PrinterCallback,
                          TrainerCallback, set_seed)

torch.set_num_threads(THREADS)
SHAPE = json.load(open(f"{FOLDER}/shape.json"))


def settings(**extra):
    """TRL's own defaults are bf16 and activation checkpointing; both are off."""
    return dict(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
                logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=7,
                output_dir=tempfile.mkdtemp(), **extra)


class StepTimes(TrainerCallback):
    def __init__(self):
        self.seconds, self.phases = [], {}

    def on_train_begin(self, *_, **__):
        self.last = time.perf_counter()

    def on_step_end(self, *_, **__):
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        for phase in self.phases.values():
            phase.append(0.0)

    def timed(self, name, function):
        """Count the seconds in `function` as the phase `name` of the current step."""
        phase = self.phases.setdefault(name, [0.0])

        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                phase[-1] += time.perf_counter() - start
        return call


def causal(name):
    return LlamaForCausalLM.from_pretrained(f"{FOLDER}/{name}", dtype=torch.float32)


def scalar(name):
    return LlamaForSequenceClassification.from_pretrained(f"{FOLDER}/{name}", dtype=torch.float32)


def rows():
    return Dataset.from_list([json.loads(line) for line in open(f"{FOLDER}/rows.jsonl")])


def reward(times, words):
    return trl.RewardTrainer(scalar("reward"), processing_class=words, train_dataset=rows(), args=trl.RewardConfig(
        **settings(per_device_train_batch_size=SHAPE["pairs"], max_steps=STEPS, max_length=None)))


def dpo(times, words):
    trainer = trl.DPOTrainer(
        causal("policy"), causal("policy"), processing_class=words, train_dataset=rows(), args=trl.DPOConfig(
            **settings(per_device_train_batch_size=SHAPE["pairs"], max_steps=STEPS, beta=0.1, loss_type="sigmoid",
                       max_length=None)))
    trainer.ref_model.forward = times.timed("reference", trainer.ref_model.forward)
    return trainer


def grpo(times, words):
    def even_share(completion_ids, **_):
        return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

    policy = causal("policy")
    trainer = trl.GRPOTrainer(policy, even_share, processing_class=words, train_dataset=rows(), args=trl.GRPOConfig(
        **settings(per_device_train_batch_size=SHAPE["prompts"] * SHAPE["generations"], max_steps=STEPS,
                   num_generations=SHAPE["generations"], beta=0.0, max_completion_length=SHAPE["new"], temperature=1.0,
                   generation_kwargs=dict(min_new_tokens=SHAPE["new"]))))
    policy.generate = times.timed("generate", policy.generate)
    trainer._generate_and_score_completions = times.timed("rollout", trainer._generate_and_score_completions)
    return trainer


def ppo(times, words):
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    words.padding_side = "left"
    data = rows().map(lambda row: dict(input_ids=words(row["prompt"])["input_ids"]), remove_columns=["prompt"])
    policy = causal("policy")
    trainer = PPOTrainer(PPOConfig(**settings(
        per_device_train_batch_size=SHAPE["prompts"], local_rollout_forward_batch_size=SHAPE["prompts"],
        num_mini_batches=1, num_ppo_epochs=SHAPE["epochs"], total_episodes=SHAPE["prompts"] * STEPS,
        response_length=SHAPE["new"], temperature=1.0, num_sample_generations=0)),
        words, policy, copy.deepcopy(policy), scalar("reward"), data, scalar("value"))
    trainer.accelerator.print = lambda *_: None
    policy.generate = times.timed("generate", policy.generate)
    return trainer


def main():
    set_seed(7)
    times = StepTimes()
    trainer = dict(reward=reward, dpo=dpo, grpo=grpo, ppo=ppo)[ALGORITHM](
        times, AutoTokenizer.from_pretrained(f"{FOLDER}/policy"))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(times)
    result = trainer.train()
    print(json.dumps(dict(version=trl.__version__, torch=torch.__version__, step_seconds=times.seconds,
                          phases={k: v[:STEPS] for k, v in times.phases.items()},
                          loss=getattr(result, "training_loss", None))))


main()
