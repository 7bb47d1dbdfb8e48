//! The operands of a unit's program.

use lockstep_core::{Bytes, DType};
use lockstep_device::cuda::{CublasLt, GpuError, KernelSource, KernelVariant};
use lockstep_device::{Device, Machine, Queue, View};
use lockstep_ops::attention::{self, Heads, KV_PAGE_TOKENS, KvCache};
use lockstep_ops::dropout::{self, Mask};
use lockstep_ops::rows::RowMap;
use lockstep_ops::{Mat, bias, embedding, matmul, rmsnorm, rope, score_head};
use lockstep_shape::{
    Channel, Head, ModelShape, Param, Programs, Slot, SlotCols, SlotRows, UnitKind, UnitShape, WeightExtent,
    WeightFormat,
};

/// A micro-batch on the device: `tokens` and `positions` \[T\], `cu_seqlens` \[documents + 1\], `targets`, outputs and
/// coefficients \[R\] for the rows that the head runs on. Views have the micro-batch's own lengths, not the planned
/// maxima.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'m> {
    pub tokens: View<'m>,
    pub targets: View<'m>,
    pub positions: View<'m>,
    pub cu_seqlens: View<'m>,
    /// The rows that the head runs on. In decode: the last one of every sequence, by `source` alone.
    pub head_rows: RowMap<'m>,
    /// The row of every position of the documents, if some of them share rows.
    pub shared_rows: Option<RowMap<'m>>,
    /// `outputs` are the head's outputs for each of its rows, by [`Channel`]; `coefficients` are the loss's derivatives by
    /// them.
    pub outputs: PerChannel<'m>,
    pub coefficients: Option<PerChannel<'m>>,
    /// Set in decode.
    pub decode: Option<DecodeInputs<'m>>,
}

/// A view \[R\] for each channel that the model has.
pub type PerChannel<'m> = [Option<View<'m>>; Channel::COUNT];

/// Additional inputs of decode. `tokens` are then the new tokens, and `positions` their positions in their documents.
#[derive(Clone, Copy, Debug)]
pub struct DecodeInputs<'m> {
    /// One layer's keys and values; `None` for units without attention.
    pub cache: Option<KvCache<'m>>,
    /// Each document's pages in the cache: \[documents, N\].
    pub page_tables: View<'m>,
}

/// The embedding table, if the head shares it.
#[derive(Clone, Copy, Debug)]
pub struct TiedEmbedding<'m> {
    pub unit: &'m UnitShape,
    pub params: View<'m>,
    pub grads: Option<View<'m>>,
}

/// A unit with everything its program needs.
#[derive(Clone, Copy)]
pub struct Unit<'m> {
    pub queue: &'m Queue,
    pub model: &'m ModelShape,
    pub shape: &'m UnitShape,
    pub programs: &'m Programs,
    /// The unit's working parameters, unsharded.
    pub params: View<'m>,
    /// Gradients of its trained elements, unsharded, in f32.
    pub grads: Option<View<'m>>,
    /// Whether gradients are overwritten instead of added to.
    pub overwrite_grads: bool,
    pub tied: Option<TiedEmbedding<'m>>,
    pub slots: [Option<View<'m>>; Slot::COUNT],
    pub inputs: Inputs<'m>,
    /// cos and sin, each \[positions, h/2\].
    pub tables: View<'m>,
    pub workspace: View<'m>,
    pub head_chunk: usize,
    /// The outputs of a language model's head are those of softmax(logits · `inverse_temperature`).
    pub inverse_temperature: f32,
    /// What dropout's masks depend on. `None` if dropout is off, as in scoring and generation.
    pub dropout: Option<DropoutKey<'m>>,
}

/// What masks depend on besides layer and site.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKey<'m> {
    pub seed: u64,
    pub step: u32,
    /// The sample that each document is: \[documents\].
    pub samples: View<'m>,
}

impl<'m> Unit<'m> {
    pub(crate) fn tokens(&self) -> usize {
        self.inputs.tokens.len()
    }

    /// The number of rows that the head runs on.
    pub(crate) fn num_head_rows(&self) -> usize {
        self.inputs.head_rows.source.len()
    }

    fn rows_of(&self, slot: Slot) -> usize {
        match self.programs.spec(slot).rows {
            SlotRows::Tokens => self.tokens(),
            SlotRows::Positions => self.inputs.shared_rows.map_or(self.tokens(), |map| map.source.len()),
            SlotRows::HeadRows => self.num_head_rows(),
            SlotRows::Chunk => panic!("{slot:?} has the rows of a chunk"),
        }
    }

    /// A slot, with the rows that this micro-batch has.
    pub(crate) fn mat(&self, cols: SlotCols) -> Mat<'m> {
        let width = self.programs.spec(cols.slot).width;
        let rows = self.rows_of(cols.slot);
        let whole = Mat::dense(self.view(cols.slot).first(rows * width), rows, width);
        if cols.len == 0 { whole } else { whole.columns(cols.start, cols.len) }
    }

    /// The first columns of a slot that is wider than what is in it.
    pub(crate) fn first_columns(&self, slot: Slot, len: usize) -> Mat<'m> {
        self.mat(SlotCols { slot, start: 0, len })
    }

    /// The first rows of a slot that has one row per row of a chunk.
    pub(crate) fn chunk_mat(&self, slot: Slot, rows: usize) -> Mat<'m> {
        let width = self.programs.spec(slot).width;
        Mat::dense(self.view(slot).first(rows * width), rows, width)
    }

    pub(crate) fn decode(&self) -> &DecodeInputs<'m> {
        self.inputs.decode.as_ref().expect("this step only runs in decode")
    }

    /// A statistic of each row, of the slot's width.
    pub(crate) fn statistic(&self, slot: Slot) -> View<'m> {
        self.mat(slot.into()).view
    }

    pub(crate) fn view(&self, slot: Slot) -> View<'m> {
        self.slots[slot.index()].unwrap_or_else(|| panic!("slot {slot:?} has no buffer in this operation"))
    }

    fn owner(&self, param: Param) -> (&'m UnitShape, View<'m>, Option<View<'m>>) {
        match self.tied {
            Some(tied) if param == Param::Embedding => (tied.unit, tied.params, tied.grads),
            _ => (self.shape, self.params, self.grads),
        }
    }

    fn extent(unit: &UnitShape, param: Param) -> WeightExtent {
        unit.extent(param).unwrap_or_else(|| panic!("{} has no {param:?}", unit.kind))
    }

    /// A weight as stored: a vector, or \[out, in\].
    pub(crate) fn weight(&self, param: Param) -> View<'m> {
        self.weight_mat(param).view
    }

    /// The same as a matrix; a fused weight has the rows of all its parts.
    pub(crate) fn weight_mat(&self, param: Param) -> Mat<'m> {
        let (unit, params, _) = self.owner(param);
        let WeightExtent { start, rows, cols, .. } = Self::extent(unit, param);
        Mat::dense(params.slice(start, rows * cols), rows, cols)
    }

    /// The buffer of a weight's gradient; `None` if the weight is frozen.
    pub(crate) fn grad(&self, param: Param) -> Option<View<'m>> {
        self.grad_mat(param).map(|grad| grad.view)
    }

    pub(crate) fn grad_mat(&self, param: Param) -> Option<Mat<'m>> {
        let (unit, _, grads) = self.owner(param);
        let WeightExtent { trained_start, rows, cols, .. } = Self::extent(unit, param);
        grads.zip(trained_start).map(|(g, start)| Mat::dense(g.slice(start, rows * cols), rows, cols))
    }

    /// The heads of this unit's layer.
    pub(crate) fn heads(&self) -> Heads {
        let UnitKind::Block(layer) = self.shape.kind else { panic!("{} has no heads", self.shape.kind) };
        Heads {
            num_q: self.model.heads,
            num_kv: self.model.kv_heads,
            width: self.model.head_dim,
            scale: 1.0 / (self.model.head_dim as f32).sqrt(),
            window: self.model.window_of(layer as usize),
        }
    }

    /// The mask of a site; `None` if dropout is off.
    pub(crate) fn mask(&self, site: dropout::Site) -> Option<Mask<'m>> {
        let DropoutKey { seed, step, samples } = self.dropout?;
        let UnitKind::Block(layer) = self.shape.kind else { panic!("{} has no dropout", self.shape.kind) };
        let rates = self.model.dropout;
        let rate = match site {
            dropout::Site::Probabilities => rates.attention,
            dropout::Site::AttentionOut | dropout::Site::MlpOut => rates.residual,
            dropout::Site::Adapter(_) => self.model.lora.as_ref().map_or(0.0, |lora| lora.dropout),
        };
        (rate > 0.0).then_some(Mask { rate, seed, step, layer, site, samples })
    }

    pub(crate) fn rope(&self) -> rope::Table<'m> {
        rope_table(self.model, self.tables)
    }
}

fn rope_table<'m>(model: &ModelShape, tables: View<'m>) -> rope::Table<'m> {
    let half = tables.len() / 2;
    rope::Table { cos: tables.first(half), sin: tables.slice(half, half), half: model.head_dim / 2 }
}

/// Computes the RoPE tables, once, before the first step.
pub fn fill_rope_tables(model: &ModelShape, tables: View) -> Result<(), GpuError> {
    let frequencies = model.rope_inverse_frequencies();
    rope::fill(rope_table(model, tables), &frequencies, model.rope.attention_factor())
}

/// The kernels that run a model. Their memory requirements differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelBackend {
    Cpu {
        num_threads: usize,
    },
    /// `memory` and `name` are the GPU's, if there is a GPU to ask.
    Cuda {
        memory: Option<Bytes>,
        name: Option<&'static str>,
    },
}

impl From<Machine> for KernelBackend {
    fn from(machine: Machine) -> KernelBackend {
        match machine.device {
            Device::Cpu => KernelBackend::Cpu { num_threads: machine.num_threads },
            Device::Cuda(gpu) => KernelBackend::Cuda { memory: Some(gpu.total), name: Some(&gpu.name) },
        }
    }
}

/// The size of one layer's page of the KV cache for [`KV_PAGE_TOKENS`] tokens, in f32 elements.
pub fn kv_page_elems(model: &ModelShape, storage: DType, kernels: KernelBackend) -> usize {
    let (heads, width) = (model.kv_heads, model.head_dim);
    match kernels {
        KernelBackend::Cpu { .. } => attention::kv_page_elems(heads, width, KV_PAGE_TOKENS),
        KernelBackend::Cuda { .. } => attention::cuda_kv_page_elems(heads, width, KV_PAGE_TOKENS, storage),
    }
}

/// The sources of the kernels that a model's steps run on a GPU.
pub fn kernel_sources(
    model: &ModelShape,
    storage: DType,
    sm: u32,
) -> Vec<(&'static KernelSource, KernelVariant)> {
    let heads =
        Heads { num_q: model.heads, num_kv: model.kv_heads, width: model.head_dim, scale: 1.0, window: None };
    let mut all = lockstep_ops::model_kernel_sources(sm, storage, &heads, model.has_dropout());
    all.extend(model.lora.iter().map(|_| lockstep_ops::adapter_kernel_source(storage)));
    all.extend(
        (model.frozen_projections == WeightFormat::Nf4)
            .then(|| lockstep_ops::dequantise_kernel_source(storage)),
    );
    all.extend((model.head == Head::Score).then(|| lockstep_ops::score_head_kernel_source(storage)));
    all
}

/// The largest workspace that an operation of this model needs.
pub fn workspace_bytes(model: &ModelShape, tokens: usize, max_doc: usize, kernels: KernelBackend) -> Bytes {
    let norm = |dim| rmsnorm::scratch_elems(tokens, dim) + dim;
    let norm = norm(model.dim).max(norm(model.head_dim));
    let biased = [
        (model.biases.qkv, model.q_width().max(model.kv_width())),
        (model.biases.out, model.dim),
        (model.biases.mlp, model.ffn.max(model.dim)),
    ];
    let biased = biased.into_iter().filter(|(has, _)| *has).map(|(_, dim)| dim).max().unwrap_or(0);
    let (products, attends) = match kernels {
        KernelBackend::Cpu { num_threads } => (
            matmul::scratch_bytes(num_threads),
            attention::scratch_bytes(num_threads, max_doc, model.head_dim),
        ),
        KernelBackend::Cuda { .. } => {
            (CublasLt::WORKSPACE, attention::cuda_scratch_bytes(tokens, model.heads, model.head_dim))
        }
    };
    products
        .max(attends)
        .max(embedding::scratch_bytes(tokens))
        .max(Bytes(4 * norm as u64))
        .max(Bytes(4 * score_head::scratch_elems(tokens, model.dim) as u64))
        .max(Bytes(4 * bias::scratch_elems(tokens, biased) as u64))
        .max(embedding::scratch_bytes(tokens))
        .align_to(4096)
}
