//! Programs: ordered lists of steps on slots and weights.

use crate::{Param, Projection, Slot, SlotSpec};

/// Which activations a block recomputes in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// None: forward saves everything that backward reads.
    None,
    /// The outputs of norms and of SwiGLU, which cost little.
    Selective,
    /// All: only the block's input is saved, and the block runs forward again before its backward.
    Full,
}

/// The direction of a rotation by the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeDirection {
    Forward,
    Backward,
}

/// Where in a block dropout is applied: to what is added to the residual stream, and to the input of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropoutSite {
    AttentionOut,
    MlpOut,
    Lora(Projection),
}

/// Columns `[start, start + len)` of a slot; `len` 0 means all columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotCols {
    pub slot: Slot,
    pub start: usize,
    pub len: usize,
}

impl From<Slot> for SlotCols {
    fn from(slot: Slot) -> SlotCols {
        SlotCols { slot, start: 0, len: 0 }
    }
}

/// One operation on slots and weights. Weight gradients are accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramStep {
    /// y = table\[tokens\]
    Embed { y: Slot, w: Param },
    /// dtable\[tokens\] += dy
    EmbedBack { dy: Slot, w: Param },
    /// y = x · rstd(x) · w, over groups as wide as w
    Norm { x: SlotCols, w: Param, y: SlotCols, rstd: Slot },
    /// dx (+)= ∂/∂x, dw += ∂/∂w; `recompute_output`: also overwrites dy with a recomputed y
    NormBack {
        dy: SlotCols,
        x: SlotCols,
        w: Param,
        rstd: Slot,
        dx: SlotCols,
        add: bool,
        recompute_output: bool,
    },
    /// y = (residual +) x · wᵀ; the residual may be y itself
    Linear { x: SlotCols, w: Param, y: SlotCols, residual: Option<SlotCols> },
    /// dx (+)= dy · w
    LinearBackInput { dy: SlotCols, w: Param, dx: SlotCols, add: bool },
    /// dw += dyᵀ · x
    LinearBackWeight { dy: SlotCols, x: SlotCols, w: Param },
    /// Adds b to every row of y, in place
    Bias { y: SlotCols, b: Param },
    /// db += the sum of dy's rows
    BiasBack { dy: SlotCols, b: Param },
    /// y = residual + dropout(y), in place
    Dropout { y: Slot, residual: Slot, site: DropoutSite },
    /// dx = dy with the mask of the forward pass applied
    DropoutBack { dy: Slot, dx: Slot, site: DropoutSite },
    /// y = x with a mask applied, in the first columns of y
    DropoutCopy { x: SlotCols, y: Slot, site: DropoutSite },
    /// y += x with a mask applied, of the first columns of x
    DropoutAdd { x: Slot, y: SlotCols, site: DropoutSite },
    /// Multiplies x by the scale of the model's adapters, in place
    LoraScale { x: SlotCols },
    /// Rotates queries and keys in place
    Rope { x: SlotCols, direction: RopeDirection },
    /// `shares`: documents may share rows; attention then runs on copies at every position
    Attention { q: SlotCols, k: SlotCols, v: SlotCols, out: Slot, lse: Slot, shares: bool },
    AttentionBack {
        q: SlotCols,
        k: SlotCols,
        v: SlotCols,
        out: Slot,
        lse: Slot,
        dout: Slot,
        dqkv: [SlotCols; 3],
        shares: bool,
    },
    /// y = silu(g) · u
    SwiGlu { g: SlotCols, u: SlotCols, y: Slot },
    /// Overwrites g and u with their gradients; `recompute_output`: also overwrites dy with a recomputed y
    SwiGluBack { g: SlotCols, u: SlotCols, dy: Slot, recompute_output: bool },
    /// y = the rows of x that the head runs on: those whose outputs are needed; in decode the last one of every sequence
    Pick { x: Slot, y: Slot },
    /// dx = the sum of the rows of dy that were picked from each row; zero for rows that were not picked
    PickBack { dy: Slot, dx: Slot },
    /// The logits of at most one head chunk of rows
    HeadLogits { x: Slot, w: Param, logits: Slot },
    /// The head's outputs per row, chunk by chunk
    HeadOutputs { x: Slot, w: Param, logits: Slot },
    /// The same, and in the same pass dx and dw from the objective's coefficients
    HeadFused { x: Slot, w: Param, logits: Slot, dx: Slot },
    /// The scalar head's output: x · w
    Score { x: Slot, w: Param },
    /// dx = c · w, dw += Σ c · x, where c are the objective's coefficients
    ScoreBack { x: Slot, w: Param, dx: Slot },
}

impl ProgramStep {
    /// The slots that the step reads. A slot that is updated in place is both read and written.
    pub fn reads(&self) -> Vec<Slot> {
        use ProgramStep::*;
        match *self {
            Embed { .. } => vec![],
            EmbedBack { dy, .. } => vec![dy],
            Norm { x, .. } => vec![x.slot],
            NormBack { dy, x, rstd, dx, add, .. } => {
                let mut all = vec![dy.slot, x.slot, rstd];
                all.extend(add.then_some(dx.slot));
                all
            }
            Linear { x, residual, .. } => {
                let mut all = vec![x.slot];
                all.extend(residual.map(|cols| cols.slot));
                all
            }
            LinearBackInput { dy, dx, add, .. } => {
                let mut all = vec![dy.slot];
                all.extend(add.then_some(dx.slot));
                all
            }
            LinearBackWeight { dy, x, .. } => vec![dy.slot, x.slot],
            Bias { y, .. } => vec![y.slot],
            BiasBack { dy, .. } => vec![dy.slot],
            Dropout { y, residual, .. } => vec![y, residual],
            DropoutBack { dy, .. } => vec![dy],
            DropoutCopy { x, .. } => vec![x.slot],
            DropoutAdd { x, y, .. } => vec![x, y.slot],
            LoraScale { x } | Rope { x, .. } => vec![x.slot],
            Attention { q, k, v, .. } => vec![q.slot, k.slot, v.slot],
            AttentionBack { q, k, v, out, lse, dout, .. } => vec![q.slot, k.slot, v.slot, out, lse, dout],
            SwiGlu { g, u, .. } => vec![g.slot, u.slot],
            SwiGluBack { g, u, dy, .. } => vec![g.slot, u.slot, dy],
            PickBack { dy, .. } => vec![dy],
            Pick { x, .. }
            | HeadLogits { x, .. }
            | HeadOutputs { x, .. }
            | HeadFused { x, .. }
            | Score { x, .. }
            | ScoreBack { x, .. } => vec![x],
        }
    }

    /// The slots that the step writes.
    pub fn writes(&self) -> Vec<Slot> {
        use ProgramStep::*;
        match *self {
            Embed { y, .. } => vec![y],
            EmbedBack { .. } | LinearBackWeight { .. } | BiasBack { .. } => vec![],
            Norm { y, rstd, .. } => vec![y.slot, rstd],
            NormBack { dy, dx, recompute_output, .. } => {
                let mut all = vec![dx.slot];
                all.extend(recompute_output.then_some(dy.slot));
                all
            }
            LinearBackInput { dx, .. } => vec![dx.slot],
            Linear { y, .. } | Bias { y, .. } => vec![y.slot],
            Dropout { y, .. } => vec![y],
            DropoutBack { dx, .. } => vec![dx],
            DropoutCopy { y, .. } => vec![y],
            DropoutAdd { y, .. } => vec![y.slot],
            LoraScale { x } | Rope { x, .. } => vec![x.slot],
            Attention { out, lse, shares, .. } => {
                let copies = [Slot::PosQkv, Slot::PosO, Slot::PosLse];
                [out, lse].into_iter().chain(copies.into_iter().filter(|_| shares)).collect()
            }
            AttentionBack { dqkv, shares, .. } => {
                let copies = [Slot::PosQkv, Slot::PosO, Slot::PosLse, Slot::PosDO, Slot::PosDQkv];
                dqkv.into_iter().map(|c| c.slot).chain(copies.into_iter().filter(|_| shares)).collect()
            }
            SwiGlu { y, .. } => vec![y],
            SwiGluBack { g, u, dy, recompute_output } => {
                let mut all = vec![g.slot, u.slot];
                all.extend(recompute_output.then_some(dy));
                all
            }
            Pick { y, .. } => vec![y],
            PickBack { dx, .. } => vec![dx],
            HeadLogits { logits, .. } | HeadOutputs { logits, .. } => vec![logits],
            HeadFused { logits, dx, .. } => vec![logits, dx],
            Score { .. } => vec![],
            ScoreBack { dx, .. } => vec![dx],
        }
    }
}

/// An ordered list of steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pub steps: Vec<ProgramStep>,
}

impl Program {
    pub fn new(steps: Vec<ProgramStep>) -> Program {
        Program { steps }
    }

    /// All slots that the program uses, in the order of their first use.
    pub fn slots(&self) -> Vec<Slot> {
        let mut seen = Vec::new();
        for step in &self.steps {
            for slot in step.reads().into_iter().chain(step.writes()) {
                if !seen.contains(&slot) {
                    seen.push(slot);
                }
            }
        }
        seen
    }
}

/// All programs of a unit, and its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    pub forward: Program,
    /// Runs before `backward` with full recompute; otherwise empty.
    pub recompute: Program,
    pub backward: Program,
    /// The head's forward and backward in one pass; empty for other units.
    pub fused: Program,
    /// The head's logits for the last token of every sequence, for generation; empty for other units.
    pub decode: Program,
    /// Slots that forward saves for backward.
    pub saved: Vec<Slot>,
    /// Slots that `recompute` computes for backward.
    pub recomputed: Vec<Slot>,
    pub specs: Vec<SlotSpec>,
}

impl Programs {
    pub fn spec(&self, slot: Slot) -> &SlotSpec {
        self.specs.iter().find(|s| s.slot == slot).expect("every slot of a program has a size")
    }
}

/// Inserts the forward steps that compute missing slots before the backward steps that read them. The slots `saved` are
/// available already. A slot that backward wrote or recomputed stays available for the rest of the program.
pub(crate) fn with_recomputation(
    backward: Vec<ProgramStep>,
    forward: &[ProgramStep],
    saved: &[Slot],
) -> Vec<ProgramStep> {
    fn recompute_slot(
        slot: Slot,
        forward: &[ProgramStep],
        available: &mut Vec<Slot>,
        out: &mut Vec<ProgramStep>,
    ) {
        if available.contains(&slot) || !forward.iter().any(|step| step.writes().contains(&slot)) {
            return;
        }
        available.push(slot);
        for step in forward.iter().filter(|step| step.writes().contains(&slot)) {
            for read in step.reads() {
                recompute_slot(read, forward, available, out);
            }
            out.push(*step);
        }
    }
    let mut available = saved.to_vec();
    let mut out = Vec::new();
    for step in backward {
        for slot in step.reads() {
            recompute_slot(slot, forward, &mut available, &mut out);
        }
        available.extend(step.writes());
        out.push(step);
    }
    out
}
