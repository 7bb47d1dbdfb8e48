//! The engine: a plan, its memory, and the lane that runs it.

use lockstep_core::sum::Node;
use lockstep_core::{Bytes, DType};
use lockstep_device::{Memory, Queue, View};
use lockstep_plan::{Lane, ModelPlan, RunPlan, schedule_text};

use crate::driver::MicroBatch;
use crate::error::EngineError;
use crate::places::Places;

/// Runs the training phase of a plan.
pub struct Engine {
    pub(crate) plan: RunPlan,
    pub(crate) phase: usize,
    pub(crate) places: Places,
    pub(crate) memory: Memory,
    pub(crate) queue: Queue,
    /// Room for the subtrees of the norm, so that folding them allocates nothing.
    pub(crate) nodes: Vec<Node>,
    /// First block of each unit among all units' blocks: its leaves' absolute indices.
    pub(crate) first_block: Vec<u64>,
}

impl Engine {
    /// Takes the plan's memory. Parameters are zero until they are initialised or loaded.
    pub fn new(plan: RunPlan, queue: Queue) -> Result<Engine, EngineError> {
        let phase =
            plan.phases.iter().position(|p| p.name.starts_with("train")).expect("a plan has a train phase");
        if let Some(i) = plan.phases[phase].schedule.ops.iter().position(|op| op.lane != Lane::Compute) {
            let text = schedule_text(&plan, &plan.phases[phase]);
            let line = text.lines().nth(i + 1).unwrap_or_default().trim();
            let lane = plan.phases[phase].schedule.ops[i].lane.to_string();
            return Err(EngineError::Lane { lane, op: line.to_string() });
        }
        let places = Places::of(&plan, &plan.phases[phase]);
        let Queue::Cpu(cpu) = &queue else { unreachable!("only CPU queues exist") };
        let memory = Memory::take(plan.arena, &cpu.pool)?;
        let model = &plan.input.models[plan.phases[phase].model.0 as usize];
        lockstep_model::fill_tables(&model.shape, places.tables.view(&memory));
        let mut at = 0;
        let first_block = model
            .units
            .iter()
            .map(|unit| {
                let first = at;
                at += (unit.trainable_elems / lockstep_core::ALIGN_ELEMS) as u64;
                first
            })
            .collect();
        // Each unit's range folds to at most two subtrees per level.
        let nodes = Vec::with_capacity(model.units.len() * 128);
        Ok(Engine { plan, phase, places, memory, queue, nodes, first_block })
    }

    pub fn plan(&self) -> &RunPlan {
        &self.plan
    }

    /// Bytes taken: what the plan said.
    pub fn arena_bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    pub(crate) fn model(&self) -> &ModelPlan {
        &self.plan.input.models[self.plan.phases[self.phase].model.0 as usize]
    }

    /// The parts of the inputs buffer, at a batch's own lengths: tokens, targets, positions, bounds.
    pub(crate) fn input_views(&self, tokens: usize, docs: usize) -> [View<'_>; 4] {
        let all = self.places.inputs.view(&self.memory);
        let room = self.plan.input.bounds.tokens;
        [
            all.slice(0, tokens),
            all.slice(room, tokens),
            all.slice(2 * room, tokens),
            all.slice(3 * room, docs + 1),
        ]
    }

    /// Copies a micro-batch to the device.
    pub(crate) fn feed(&self, batch: &MicroBatch) -> Result<(), EngineError> {
        let bounds = self.plan.input.bounds;
        let docs = batch.cu_seqlens.len().saturating_sub(1);
        let longest = batch.cu_seqlens.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0);
        for (what, found, planned) in [
            ("tokens", batch.tokens.len(), bounds.tokens),
            ("documents", docs, bounds.docs),
            ("tokens in one document", longest, bounds.max_doc),
        ] {
            if found > planned {
                return Err(EngineError::TooLarge { what, found, planned });
            }
        }
        let [tokens, targets, positions, cu_seqlens] = self.input_views(batch.tokens.len(), docs);
        tokens.write(batch.tokens);
        targets.write(batch.targets);
        positions.write(batch.positions);
        cu_seqlens.write(if batch.cu_seqlens.is_empty() { &[0] } else { batch.cu_seqlens });
        Ok(())
    }

    pub(crate) fn storage(&self) -> DType {
        self.plan.input.storage
    }
}
