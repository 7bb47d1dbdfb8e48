//! A custom strategy: it reduces all gradients after backward instead of while it runs. It is slower than ddp but
//! gives the same bits, which this example shows on two ranks in threads.
//!
//!     cargo run --release -p lockstep-train --example custom_strategy
//!
//! A strategy is a function that emits operations through a `StepBuilder`. The waits between lanes, the memory plan and
//! the checks follow from the buffers that the operations declare.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use lockstep_core::Rank;
use lockstep_data::Batch;
use lockstep_device::{Memory, Queue};
use lockstep_engine::{Comms, Engine, Resources, UpdateRule, UpdateSettings};
use lockstep_model::KernelBackend;
use lockstep_plan::strategy::{Strategy, ddp};
use lockstep_plan::{ModelId, ParamState, PlanInput, RunPlan, StepBuilder, build};
use lockstep_train::{Sft, StepCounts, train_step};

const RANKS: u32 = 2;
const TOKENS: u32 = 31;

/// Runs the backward of all units first, then one reduction of everything.
fn reduce_last(b: &mut StepBuilder) {
    for micro in 0..b.num_micro_batches() {
        let uses = b.micro_batch_passes(micro);
        b.run_with_prefetch(&uses, &mut |_, _| {});
        for unit in (0..=b.head_unit()).rev() {
            if b.reduces_after(unit, micro) {
                b.add_to_bucket(unit, micro);
            }
        }
        b.flush_bucket(micro);
    }
    b.clip_and_update();
}

fn main() -> Result<(), Box<dyn Error>> {
    let custom = train(reduce_last)?;
    let builtin = train(ddp)?;
    assert!(custom == builtin, "the strategies differ");
    println!("{} weights are bit-identical", custom.len());
    Ok(())
}

/// A rank's plan of a small model on two ranks, with the given strategy instead of ddp.
fn plan(strategy: Strategy, rank: Rank) -> Result<RunPlan, Box<dyn Error>> {
    let text = "model: tiny\noutput_dir: out\nmax_length: 32\nthreads: 1\nnproc: 2\nper_device_train_batch_size: 1\n\
                gradient_accumulation_steps: 2\n";
    let source = lockstep_config::Source { name: "custom_strategy", text };
    let config = lockstep_config::load(Some(source), &[])?;
    let tokenizer = lockstep_train::load_tokenizer(&config)?;
    let models = lockstep_train::RunModels::of(&config, &tokenizer)?;
    let kernels = KernelBackend::Cpu { num_threads: 1 };
    let ddp = lockstep_train::plan_for(&config, &models, &tokenizer, None, kernels)?;
    let input = PlanInput { strategy, ..ddp.input.clone() };
    // `build` checks the invariants of every strategy: nothing is read before it is written, each gradient is reduced
    // once, and so on. An engine only accepts plans that pass.
    Ok(build(input, rank)?)
}

/// Trains three steps on two ranks. Returns the final weights as bits.
fn train(strategy: Strategy) -> Result<Vec<u32>, Box<dyn Error>> {
    let plans = (0..RANKS).map(|rank| plan(strategy, Rank(rank))).collect::<Result<Vec<_>, _>>()?;
    let comms = Comms::between_threads(RANKS, Duration::from_secs(30));
    let outcomes = std::thread::scope(|scope| {
        let ranks = plans.into_iter().zip(comms);
        let ranks: Vec<_> = ranks.map(|(plan, comms)| scope.spawn(move || run_rank(plan, comms))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank's thread")).collect::<Vec<_>>()
    });
    let mut weights = outcomes.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(weights.swap_remove(0))
}

fn run_rank(plan: RunPlan, comms: Comms) -> Result<Vec<u32>, lockstep_engine::EngineError> {
    let (rank, queue) = (plan.rank, Queue::cpu(1));
    let memory = Arc::new(Memory::allocate(plan.arena_bytes, queue.pool())?);
    let resources = Resources { memory, comms: Some(comms), nccl: None, queue, nvme_dir: None };
    let mut engine = Engine::new(plan, resources)?;
    engine.model_mut(ModelId::FIRST).initialise(42)?;
    for step in 0..3 {
        let batches = [batch(rank, 2 * step), batch(rank, 2 * step + 1)];
        let tokens = u64::from(RANKS * 2 * TOKENS);
        let counts = StepCounts { supervised: tokens, tokens, ..StepCounts::default() };
        let updates = UpdateSettings {
            t: u64::from(step) + 1,
            lr: 1e-3,
            rule: UpdateRule::AdamW { betas: (0.9, 0.999), eps: 1e-8 },
            weight_decay: 0.0,
            max_norm: Some(1.0),
        };
        let (_, metrics) =
            train_step(&mut engine, ModelId::FIRST, &mut Sft::default(), &batches, &counts, &updates)?;
        if rank == Rank(0) {
            println!("step {} | loss: {:.6}", step + 1, metrics.loss);
        }
    }
    let mut bits = Vec::new();
    for (u, unit) in engine.model(ModelId::FIRST).units().iter().enumerate() {
        for segment in &unit.segments {
            let mut values = vec![0.0; segment.elems()];
            engine.model(ModelId::FIRST).read_whole(
                u,
                segment,
                ParamState::Working,
                0..segment.elems(),
                &mut values,
            )?;
            bits.extend(values.iter().map(|v| v.to_bits()));
        }
    }
    Ok(bits)
}

/// A document of consecutive token ids.
fn batch(rank: Rank, number: u32) -> Batch {
    let token = |at: u32| (at + 17 * number + 5 * rank.0) % 256;
    let mut batch = Batch::default();
    batch.clear();
    batch.tokens.extend((0..TOKENS).map(token));
    batch.targets.extend((1..=TOKENS).map(token));
    batch.weights.resize(TOKENS as usize, 1.0);
    batch.positions.extend(0..TOKENS);
    batch.cu_seqlens.push(TOKENS);
    batch
}
