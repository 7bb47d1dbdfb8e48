//! Counts what a unit's program computes: GEMMs, attention, bytes of element-wise steps, and kernels.
//!
//! Letters: T tokens of a micro-batch, D model width, H query heads, h head width, V vocabulary.

use lockstep_core::DType;
use lockstep_shape::{Param, Program, ProgramStep, Slot, SlotCols, SlotRows, UnitKind};

use crate::input::ModelPlan;

/// One matrix product: `rows` × `inner` times `inner` × `cols`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemm {
    pub rows: usize,
    pub cols: usize,
    pub inner: usize,
    /// The type of the operands.
    pub dtype: DType,
    /// Bytes of operands and result.
    pub bytes: f64,
}

impl Gemm {
    /// A multiplication and an addition for every element of the result and of the summed dimension.
    pub fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.cols as f64 * self.inner as f64
    }
}

/// Work on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// GEMMs, and how often each runs.
    pub gemms: Vec<(Gemm, u32)>,
    pub attention_flops: f64,
    pub attention_dtype: DType,
    /// Bytes that kernels other than GEMMs and attention read and write.
    pub bytes: f64,
    /// Those kernels, and attention's. A GEMM counts as a kernel of its own.
    pub kernels: u32,
}

impl Work {
    pub fn none() -> Work {
        Work { gemms: vec![], attention_flops: 0.0, attention_dtype: DType::F32, bytes: 0.0, kernels: 0 }
    }

    /// One kernel that reads and writes so many bytes.
    pub fn streaming(bytes: f64) -> Work {
        Work { bytes, kernels: 1, ..Work::none() }
    }

    pub fn gemm_flops(&self) -> f64 {
        self.gemms.iter().map(|(gemm, count)| f64::from(*count) * gemm.flops()).sum()
    }

    pub fn flops(&self) -> f64 {
        self.gemm_flops() + self.attention_flops
    }
}

/// What the work of a unit's program depends on.
pub(crate) struct UnitWork<'a> {
    pub(crate) model: &'a ModelPlan,
    pub(crate) unit: u32,
    pub(crate) storage: DType,
    /// The type of the logits' gradient: the storage type on a GPU, f32 on a CPU. The GEMMs that read it compute in it.
    pub(crate) logits_grad: DType,
    /// The type that backward writes weight gradients in.
    pub(crate) grads: DType,
    /// Whether weight gradients are overwritten. Otherwise they are read and added to.
    pub(crate) fresh: bool,
}

impl UnitWork<'_> {
    pub(crate) fn of(&self, program: &Program) -> Work {
        let mut work = Work { attention_dtype: self.storage, ..Work::none() };
        program.steps.iter().for_each(|step| self.add(step, &mut work));
        work
    }

    fn add(&self, step: &ProgramStep, work: &mut Work) {
        use ProgramStep::*;
        match *step {
            Embed { y, .. } => self.stream(work, 2.0 * self.slot_bytes(y)),
            // Every row of the gradient that a token touches is read and written, in f32.
            EmbedBack { dy, .. } => {
                let rows = self.elems(dy.into()) * DType::F32.size() as f64;
                self.stream(work, self.slot_bytes(dy) + 2.0 * rows);
            }
            Norm { x, y, .. } => self.stream(work, self.bytes(x) + self.bytes(y)),
            NormBack { dy, x, dx, add, recompute_output, .. } => {
                let recomputed = f64::from(u8::from(recompute_output)) * self.bytes(dy);
                let old = f64::from(u8::from(add)) * self.bytes(dx);
                self.stream(work, self.bytes(dy) + self.bytes(x) + self.bytes(dx) + recomputed + old);
                // The gradient of the weight is summed by a second kernel.
                work.kernels += 1;
            }
            Linear { x, w, y, residual } => {
                let residual = residual.map_or(0.0, |cols| self.bytes(cols));
                let (rows, cols) = self.weight(w);
                let bytes = self.bytes(x) + self.weight_bytes(w) + self.bytes(y) + residual;
                self.gemm(work, [self.tokens(), rows, cols], bytes);
            }
            LinearBackInput { dy, w, dx, add } => {
                let old = f64::from(u8::from(add)) * self.bytes(dx);
                let (rows, cols) = self.weight(w);
                let bytes = self.bytes(dy) + self.weight_bytes(w) + self.bytes(dx) + old;
                self.gemm(work, [self.tokens(), cols, rows], bytes);
            }
            LinearBackWeight { dy, x, w } => {
                let (rows, cols) = self.weight(w);
                let bytes = self.bytes(dy) + self.bytes(x) + self.grad_bytes(w);
                self.gemm(work, [rows, cols, self.tokens()], bytes);
            }
            Bias { y, .. } => self.stream(work, 2.0 * self.bytes(y)),
            BiasBack { dy, .. } => self.stream(work, self.bytes(dy)),
            Dropout { y, residual, .. } => {
                self.stream(work, 2.0 * self.slot_bytes(y) + self.slot_bytes(residual));
            }
            DropoutBack { dy, dx, .. } => self.stream(work, self.slot_bytes(dy) + self.slot_bytes(dx)),
            DropoutCopy { x, .. } => self.stream(work, 2.0 * self.bytes(x)),
            DropoutAdd { y, .. } => self.stream(work, 3.0 * self.bytes(y)),
            LoraScale { x } | Rope { x, .. } => self.stream(work, 2.0 * self.bytes(x)),
            Attention { q, k, v, out, shares, .. } => {
                self.attention(work, 2);
                if shares {
                    self.copy_operands(work, &[q, k, v, out.into()]);
                }
            }
            // Scores again, then the gradients of probabilities, values, queries and keys.
            AttentionBack { q, k, v, out, dout, dqkv: [dq, dk, dv], shares, .. } => {
                self.attention(work, 5);
                if shares {
                    self.copy_operands(work, &[q, k, v, out.into(), dout.into(), dq, dk, dv]);
                }
            }
            SwiGlu { g, u, y } => {
                self.stream(work, self.bytes(g) + self.bytes(u) + self.slot_bytes(y));
            }
            SwiGluBack { g, u, dy, recompute_output } => {
                let recomputed = f64::from(u8::from(recompute_output)) * self.slot_bytes(dy);
                self.stream(work, 2.0 * (self.bytes(g) + self.bytes(u)) + self.slot_bytes(dy) + recomputed);
            }
            Pick { y, .. } => self.stream(work, 2.0 * self.slot_bytes(y)),
            PickBack { dy, dx } => self.stream(work, self.slot_bytes(dy) + self.slot_bytes(dx)),
            HeadLogits { w, .. } => self.head_logits(work, w, 1),
            HeadOutputs { w, .. } => self.head(work, w, false),
            HeadFused { w, .. } => self.head(work, w, true),
            Score { x, .. } => self.stream(work, self.slot_bytes(x)),
            ScoreBack { x, dx, .. } => self.stream(work, self.slot_bytes(x) + self.slot_bytes(dx)),
        }
    }

    fn stream(&self, work: &mut Work, bytes: f64) {
        work.bytes += bytes;
        work.kernels += 1;
    }

    fn gemm(&self, work: &mut Work, [rows, cols, inner]: [usize; 3], bytes: f64) {
        work.gemms.push((Gemm { rows, cols, inner, dtype: self.storage, bytes }, 1));
    }

    /// Attention that computes `matmuls` products of \[queries, keys\] by h.
    fn attention(&self, work: &mut Work, matmuls: u32) {
        let shape = &self.model.shape;
        let per_pair = 2.0 * shape.head_dim as f64 * f64::from(matmuls);
        work.attention_flops += per_pair * shape.heads as f64 * self.attended_pairs();
        work.kernels += 1;
    }

    /// Copies between rows that documents share and the positions that attention runs on: each operand is read and
    /// written once more, by a kernel of its own.
    fn copy_operands(&self, work: &mut Work, operands: &[SlotCols]) {
        operands.iter().for_each(|operand| self.stream(work, 2.0 * self.bytes(*operand)));
    }

    /// Pairs of a query and a key that attention computes for one head: the micro-batch is full of documents of the
    /// largest size, a query attends to itself and what is before it, inside the layer's window.
    fn attended_pairs(&self) -> f64 {
        let UnitKind::Block(layer) = self.model.units[self.unit as usize].kind else { return 0.0 };
        let len = self.model.bounds.max_doc.max(1) as f64;
        let window = self.model.shape.window_of(layer as usize).map_or(len, |keys| len.min(keys as f64));
        let per_doc = window * (window + 1.0) / 2.0 + (len - window) * window;
        self.tokens() as f64 / len * per_doc
    }

    /// The logits of `chunks` chunks. They are written in f32.
    fn head_logits(&self, work: &mut Work, w: Param, chunks: u32) {
        let (vocab, dim) = self.weight(w);
        let rows = self.tokens().div_ceil(self.num_chunks() as usize);
        let logits = (rows * vocab * DType::F32.size()) as f64;
        let bytes = self.weight_bytes(w) + self.storage_bytes(rows * dim) + logits;
        work.gemms.push((Gemm { rows, cols: vocab, inner: dim, dtype: self.storage, bytes }, chunks));
    }

    /// The head's outputs chunk by chunk: the logits and a pass over them. `backward`: also the gradient of the logits,
    /// and from it those of the input and of the weight.
    fn head(&self, work: &mut Work, w: Param, backward: bool) {
        let chunks = self.num_chunks();
        self.head_logits(work, w, chunks);
        let (vocab, dim) = self.weight(w);
        let rows = self.tokens().div_ceil(chunks as usize);
        let gradient = (rows * vocab * self.logits_grad.size()) as f64;
        let logits = (rows * vocab * DType::F32.size()) as f64;
        work.kernels += chunks;
        work.bytes += f64::from(chunks) * if backward { logits + gradient } else { logits };
        if backward {
            let input = self.storage_bytes(rows * dim);
            let gemm = |rows, cols, inner, bytes| Gemm { rows, cols, inner, dtype: self.logits_grad, bytes };
            let to_input = gemm(rows, dim, vocab, gradient + self.weight_bytes(w) + input);
            work.gemms.push((to_input, chunks));
            if self.trains(w) {
                let to_weight = gemm(vocab, dim, rows, gradient + input + self.grad_bytes(w));
                work.gemms.push((to_weight, chunks));
            }
        }
    }

    fn tokens(&self) -> usize {
        self.model.bounds.tokens
    }

    fn num_chunks(&self) -> u32 {
        self.tokens().div_ceil(self.model.head_chunk_tokens.max(1)) as u32
    }

    /// A weight as a matrix: rows and columns. A tied head uses the embedding's.
    fn weight(&self, w: Param) -> (usize, usize) {
        let of = |unit: u32| self.model.units[unit as usize].extent(w);
        let extent =
            of(self.unit).or_else(|| of(self.model.embed())).expect("a program names weights it has");
        (extent.rows, extent.cols)
    }

    fn trains(&self, w: Param) -> bool {
        let of = |unit: u32| self.model.units[unit as usize].is_trained(w);
        of(self.unit) || of(self.model.embed())
    }

    fn weight_bytes(&self, w: Param) -> f64 {
        let (rows, cols) = self.weight(w);
        self.storage_bytes(rows * cols)
    }

    /// Bytes of a weight's gradient: written, and read before if it is added to.
    fn grad_bytes(&self, w: Param) -> f64 {
        let (rows, cols) = self.weight(w);
        let passes = if self.fresh { 1.0 } else { 2.0 };
        passes * (rows * cols * self.grads.size()) as f64
    }

    fn storage_bytes(&self, elems: usize) -> f64 {
        (elems * self.storage.size()) as f64
    }

    fn elems(&self, cols: SlotCols) -> f64 {
        let spec = self.model.programs(self.unit).spec(cols.slot);
        let rows = match spec.rows {
            SlotRows::Tokens | SlotRows::Positions | SlotRows::HeadRows => self.tokens(),
            SlotRows::Chunk => self.model.head_chunk_tokens,
        };
        let width = if cols.len == 0 { spec.width } else { cols.len };
        (rows * width) as f64
    }

    fn bytes(&self, cols: SlotCols) -> f64 {
        let dtype = self.model.programs(self.unit).spec(cols.slot).dtype.unwrap_or(self.storage);
        self.elems(cols) * dtype.size() as f64
    }

    fn slot_bytes(&self, slot: Slot) -> f64 {
        self.bytes(slot.into())
    }
}
