//! What each operation of a schedule demands: work on the device or the host, a copy, or a collective.

use lockstep_core::{Bytes, DType, Elems};

use crate::axes::Axes;
use crate::buffer::{MemoryTier, ParamState};
use crate::cost::collective::Collective;
use crate::cost::work::{Gemm, UnitWork, Work};
use crate::lane::{Lane, LaneProcessor};
use crate::run_plan::{Phase, PhaseKind, PlanData};
use crate::schedule::{CopyEnd, CopyPayload, Op, OpKind, ReduceInto, SpanId};

/// The slowest link that a copy passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyLink {
    /// Between device and host.
    Host,
    NvmeRead,
    NvmeWrite,
    /// Inside one memory.
    Memory,
}

/// What an operation demands.
#[derive(Clone, Debug, PartialEq)]
pub enum OpDemand {
    /// It frees memory and takes no time.
    Nothing,
    Device(Work),
    /// The host's cores read and write so many bytes.
    Host {
        bytes: f64,
    },
    Copy {
        link: CopyLink,
        bytes: f64,
    },
    /// Ranks along `axes` exchange a buffer of `bytes` in total, then `local` follows on each of them.
    Collective {
        collective: Collective,
        axes: Axes,
        bytes: f64,
        local: Work,
    },
}

/// The demand of one operation, on the rank with the largest shards.
pub fn demand(plan: &PlanData, phase: &Phase, op: &Op) -> OpDemand {
    let operands = Operands { plan, phase };
    let collective = |collective, axes, bytes: Bytes| OpDemand::Collective {
        collective,
        axes,
        bytes: bytes.0 as f64,
        local: Work::none(),
    };
    match op.kind {
        OpKind::Release(_) => OpDemand::Nothing,
        OpKind::Feed { .. } => {
            let elems = operands.model().inputs_elems(plan.input.has_separate_memory());
            operands.copy(MemoryTier::Host, MemoryTier::Device, Elems(elems as u64).bytes(DType::U32))
        }
        OpKind::Forward { .. }
        | OpKind::HeadForward { .. }
        | OpKind::HeadBackward { .. }
        | OpKind::HeadStep { .. }
        | OpKind::Recompute { .. }
        | OpKind::Backward { .. } => OpDemand::Device(operands.computation(op.kind)),
        OpKind::Objective { .. } => {
            let model = operands.model();
            let elems = 2 * model.bounds.tokens * model.channels.count();
            OpDemand::Device(Work::streaming((elems * DType::F32.size()) as f64))
        }
        OpKind::Deliver => {
            let window = match phase.kind {
                PhaseKind::Train => plan.input.num_micro_batches as usize,
                PhaseKind::Score | PhaseKind::Generate => 1,
            };
            let elems = window * operands.model().per_token_elems();
            operands.copy(MemoryTier::Device, MemoryTier::Host, Elems(elems as u64).bytes(DType::F32))
        }
        OpKind::Dequantise { unit } => OpDemand::Device(operands.dequantisation(unit)),
        OpKind::Gather { span, axes: [], .. } => {
            let tier = operands.model().placements.params_tier;
            operands.copy(tier, MemoryTier::Device, operands.span_bytes(span, plan.input.storage))
        }
        OpKind::Gather { span, axes, .. } => {
            let unit = phase.schedule.span(span).parts[0].unit;
            collective(Collective::AllGather, axes, plan.input.gathered_bytes(phase.model, unit))
        }
        OpKind::AllGatherUpdated { span, axes } => {
            collective(Collective::AllGather, axes, operands.span_bytes(span, plan.input.storage))
        }
        OpKind::Reduce { .. } => operands.reduction(op.kind),
        OpKind::Copy { payload, from, to, span } => operands.payload_copy(payload, from, to, span),
        OpKind::Round { unit, .. } => {
            let elems = plan.input.resident(phase.model, unit, ParamState::Grad).1;
            let bytes = elems * (DType::F32.size() + plan.input.grad_dtype.size());
            OpDemand::Device(Work::streaming(bytes as f64))
        }
        OpKind::Add { span, .. } => {
            OpDemand::Host { bytes: 3.0 * operands.span_bytes(span, DType::F32).0 as f64 }
        }
        OpKind::Squares { span, .. } => {
            let shard = |unit: u32| plan.input.resident(phase.model, unit, ParamState::Grad).1;
            let elems: usize = phase.schedule.span(span).parts.iter().map(|part| shard(part.unit)).sum();
            operands.on_lane(op.lane, (elems * plan.input.grad_dtype.size()) as f64)
        }
        OpKind::ClipNorm { axes: [] } => operands.on_lane(op.lane, operands.accessed_bytes(op)),
        // Each rank sends one partial sum in f64.
        OpKind::ClipNorm { axes } => {
            let ranks = u64::from(plan.input.mesh.size_of(axes));
            collective(Collective::AllGather, axes, Elems(ranks).bytes(DType::F64))
        }
        OpKind::Update { unit, start, end, .. } => {
            let bytes = operands.update_bytes(unit, end - start);
            match plan.input.has_separate_memory() {
                true => operands.on_lane(op.lane, bytes),
                // A CPU rank's device is the host.
                false => OpDemand::Host { bytes },
            }
        }
        OpKind::Generate => OpDemand::Device(operands.generation()),
    }
}

/// Looks up the operands of operations.
struct Operands<'a> {
    plan: &'a PlanData,
    phase: &'a Phase,
}

impl Operands<'_> {
    fn model(&self) -> &crate::input::ModelPlan {
        self.plan.input.model(self.phase.model)
    }

    /// The program that an operation runs.
    fn computation(&self, kind: OpKind) -> Work {
        let model = self.model();
        let head = model.head();
        let (unit, fresh) = match kind {
            OpKind::Forward { unit, .. } | OpKind::Recompute { unit, .. } => (unit, true),
            OpKind::Backward { unit, fresh, .. } => (unit, fresh),
            OpKind::HeadBackward { fresh, .. } | OpKind::HeadStep { fresh, .. } => (head, fresh),
            _ => (head, true),
        };
        let programs = model.programs(unit);
        let program = match kind {
            OpKind::Forward { .. } | OpKind::HeadForward { .. } => &programs.forward,
            OpKind::Recompute { .. } => &programs.recompute,
            OpKind::HeadStep { .. } => &programs.fused,
            _ => &programs.backward,
        };
        let storage = self.plan.input.storage;
        let logits_grad = if self.plan.input.has_separate_memory() { storage } else { DType::F32 };
        let rounds = self.plan.input.backward_rounds(self.phase.model, unit);
        let grads = if rounds { self.plan.input.grad_dtype } else { DType::F32 };
        UnitWork { model, unit, storage, logits_grad, grads, fresh }.of(program)
    }

    /// The parameters of a unit as they are stored are read and, in the storage type, written: by a kernel for each tensor
    /// in 4 bits, and a copy for each other flat parameter.
    fn dequantisation(&self, unit: u32) -> Work {
        let (input, model) = (&self.plan.input, self.phase.model);
        let shape = &self.model().units[unit as usize];
        let written = Elems(shape.elems as u64).bytes(input.storage);
        let tensors = shape.segments.iter().filter(|segment| segment.quantised).count();
        let copies = shape.flat_params().iter().filter(|flat| !flat.quantised).count();
        Work {
            bytes: (input.gathered_bytes(model, unit) + written).0 as f64,
            kernels: (tensors + copies) as u32,
            ..Work::none()
        }
    }

    fn span_bytes(&self, span: SpanId, dtype: DType) -> Bytes {
        Elems(self.phase.schedule.span(span).elems() as u64).bytes(dtype)
    }

    /// A reduction over ranks, or on a single rank the addition to the accumulator.
    fn reduction(&self, kind: OpKind) -> OpDemand {
        let OpKind::Reduce { span, axis, into, .. } = kind else { return OpDemand::Nothing };
        let input = &self.plan.input;
        let sharded_over = input.sharded_over(self.phase.model, ParamState::Grad);
        let all = self.span_bytes(span, DType::F32).0 as f64;
        let rounded = |bytes: f64| bytes + bytes / 4.0 * input.grad_dtype.size() as f64;
        if input.mesh.size(axis) == 1 {
            let bytes = if input.rounds_grads() { rounded(all) } else { 3.0 * all };
            return OpDemand::Device(Work::streaming(bytes));
        }
        let shard = all / f64::from(input.mesh.size_of(sharded_over));
        let (collective, bytes) = match sharded_over.contains(&axis) {
            true => (Collective::ReduceScatter, all),
            // Along the other axes only the shard is reduced.
            false => (Collective::AllReduce, shard),
        };
        let local = match into {
            ReduceInto::Accumulator { fresh: false } => Work::streaming(3.0 * shard),
            ReduceInto::Accumulator { fresh: true } if input.rounds_grads() => {
                Work::streaming(rounded(shard))
            }
            ReduceInto::Accumulator { fresh: true } | ReduceInto::InPlace => Work::none(),
        };
        OpDemand::Collective { collective, axes: axis_slice(axis), bytes, local }
    }

    fn payload_copy(&self, payload: CopyPayload, from: CopyEnd, to: CopyEnd, span: SpanId) -> OpDemand {
        let (input, model) = (&self.plan.input, self.phase.model);
        let part = self.phase.schedule.span(span).parts[0];
        let (unit, elems) = (part.unit, part.end - part.start);
        let (resident_tier, bytes) = match payload {
            CopyPayload::Params => {
                let (tier, shard_elems, dtype) = input.resident(model, unit, ParamState::Working);
                (tier, Elems(elems.min(shard_elems) as u64).bytes(dtype))
            }
            CopyPayload::Grad | CopyPayload::RoundedGrad => {
                let (tier, _, dtype) = input.resident(model, unit, ParamState::Grad);
                (tier, Elems(elems as u64).bytes(dtype))
            }
            CopyPayload::OptimizerStates => {
                let bytes = input.optimizer_state_bytes(model, unit, elems) as u64;
                (input.optimizer_tier(model, unit), Bytes(bytes))
            }
            CopyPayload::NormLeaves => {
                let leaves = |end: CopyEnd| match end {
                    CopyEnd::Buffer(id) => self.plan.buffers[id.0 as usize].bytes(),
                    CopyEnd::Resident => Bytes::ZERO,
                };
                (MemoryTier::Device, leaves(from))
            }
        };
        let tier_of = |end: CopyEnd| match end {
            CopyEnd::Resident => resident_tier,
            CopyEnd::Buffer(id) => self.plan.buffers[id.0 as usize].tier,
        };
        self.copy(tier_of(from), tier_of(to), bytes)
    }

    fn copy(&self, from: MemoryTier, to: MemoryTier, bytes: Bytes) -> OpDemand {
        let link = match (from, to) {
            (MemoryTier::Nvme, _) => CopyLink::NvmeRead,
            (_, MemoryTier::Nvme) => CopyLink::NvmeWrite,
            (from, to) if from != to && self.plan.input.has_separate_memory() => CopyLink::Host,
            _ => CopyLink::Memory,
        };
        OpDemand::Copy { link, bytes: bytes.0 as f64 }
    }

    /// A pass over so many bytes, by the processor that runs the lane.
    fn on_lane(&self, lane: Lane, bytes: f64) -> OpDemand {
        match lane.spec().processor {
            LaneProcessor::Host => OpDemand::Host { bytes },
            LaneProcessor::Device => OpDemand::Device(Work::streaming(bytes)),
        }
    }

    fn accessed_bytes(&self, op: &Op) -> f64 {
        op.accesses.iter().map(|(id, _)| self.plan.buffers[id.0 as usize].bytes().0 as f64).sum()
    }

    /// Bytes that an update of `elems` elements reads and writes: the gradient is read, every state is read and
    /// written; parameters are written, and read where they are the masters or a part of them.
    fn update_bytes(&self, unit: u32, elems: usize) -> f64 {
        let (input, model) = (&self.plan.input, self.phase.model);
        let states = input.optimizer_state_bytes(model, unit, elems);
        let passes = if input.updates_read_working(model, unit) { 2 } else { 1 };
        let params = elems * input.storage.size() * passes;
        (elems * input.grad_dtype.size() + 2 * states + params) as f64
    }

    /// Generation at its bounds: every step reads all parameters and, on average, half of the KV cache.
    fn generation(&self) -> Work {
        let (model, storage) = (self.model(), self.plan.input.storage);
        let Some(bounds) = model.generation else { return Work::none() };
        let (steps, dim) = (bounds.tokens_per_doc as u32, model.shape.dim);
        let elems: usize = model.units.iter().map(|unit| unit.elems).sum();
        let bytes = (elems * storage.size()) as f64;
        let gemm = Gemm { rows: bounds.docs, cols: elems / dim, inner: dim, dtype: storage, bytes };
        let cache = (model.shape.layers * bounds.cache_elems * DType::F32.size()) as f64;
        let units = || 0..model.units.len() as u32;
        let kernels: usize = units().map(|unit| model.programs(unit).forward.steps.len()).sum();
        // Weights in 4 bits are dequantised in every step.
        let quantised = units().filter(|unit| self.plan.input.has_quantised(self.phase.model, *unit));
        let dequantised: Vec<Work> = quantised.map(|unit| self.dequantisation(unit)).collect();
        let bytes: f64 = dequantised.iter().map(|work| work.bytes).sum();
        Work {
            gemms: vec![(gemm, steps)],
            bytes: f64::from(steps) * (cache / 2.0 + bytes),
            kernels: steps * (kernels as u32 + dequantised.iter().map(|work| work.kernels).sum::<u32>()),
            ..Work::none()
        }
    }
}

/// One axis as a set of axes.
fn axis_slice(axis: lockstep_core::Axis) -> Axes {
    use lockstep_core::Axis;
    match axis {
        Axis::Replicate => &[Axis::Replicate],
        Axis::Shard => &[Axis::Shard],
        Axis::World => &[Axis::World],
    }
}
