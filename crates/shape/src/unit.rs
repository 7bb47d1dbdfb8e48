//! Units and their segments: which tensors a unit has and where each lies in its flat buffer.

use std::fmt;

use lockstep_core::padded_elems;

use crate::{Biases, ModelShape};

/// Which unit of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnitKind {
    Embed,
    Block(u32),
    Head,
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnitKind::Embed => f.pad("embed"),
            UnitKind::Block(i) => f.pad(&format!("block {i}")),
            UnitKind::Head => f.pad("head"),
        }
    }
}

/// A weight's role in its unit's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Param {
    Embedding,
    InputNorm,
    Q,
    K,
    V,
    QNorm,
    KNorm,
    O,
    PostNorm,
    Gate,
    Up,
    Down,
    /// What a projection adds after its product.
    BiasOf(Projection),
    FinalNorm,
    LmHead,
    /// The low-rank pair of an adapter on a projection's weight.
    AdapterA(Projection),
    AdapterB(Projection),
    /// Weights of one input as a single matrix, their rows one after the other. No tensors of their own:
    /// [`Param::parts`] are.
    Qkv,
    GateUp,
}

impl Param {
    /// The tensors that a joined weight stands for; of any other, itself alone.
    pub fn parts(&self) -> &[Param] {
        match self {
            Param::Qkv => &[Param::Q, Param::K, Param::V],
            Param::GateUp => &[Param::Gate, Param::Up],
            alone => std::slice::from_ref(alone),
        }
    }
}

/// The projections of a block: what a bias belongs to and an adapter can sit on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Projection {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
}

impl Projection {
    const ALL: [Projection; 7] = [
        Projection::Q,
        Projection::K,
        Projection::V,
        Projection::O,
        Projection::Gate,
        Projection::Up,
        Projection::Down,
    ];

    /// Its weight, and its name as people write it.
    pub(crate) const fn weight(self) -> (Param, &'static str) {
        match self {
            Projection::Q => (Param::Q, "q_proj"),
            Projection::K => (Param::K, "k_proj"),
            Projection::V => (Param::V, "v_proj"),
            Projection::O => (Param::O, "o_proj"),
            Projection::Gate => (Param::Gate, "gate_proj"),
            Projection::Up => (Param::Up, "up_proj"),
            Projection::Down => (Param::Down, "down_proj"),
        }
    }

    pub(crate) fn has_bias(self, biases: Biases) -> bool {
        match self {
            Projection::Q | Projection::K | Projection::V => biases.qkv,
            Projection::O => biases.out,
            Projection::Gate | Projection::Up | Projection::Down => biases.mlp,
        }
    }
}

/// Low-rank adapters: the base weights freeze, each target gets A\[r, in\] and B\[out, r\].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    pub rank: usize,
    /// Names as people write them: `q_proj`, `down_proj`, …
    pub targets: Vec<String>,
}

/// How a weight starts when it is not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// Normal with the model's standard deviation.
    Normal,
    One,
    Zero,
}

/// One tensor in a unit's flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub param: Param,
    /// The name in a Hugging Face folder.
    pub name: String,
    pub shape: Vec<usize>,
    /// First element in the unit; a multiple of 256.
    pub start: usize,
    pub trainable: bool,
    pub decay: bool,
    pub init: Init,
}

impl Segment {
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Where a weight lies in its unit: a tensor's segment, or those of a joined weight as one matrix. A vector
/// has one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    pub trainable: bool,
}

impl Extent {
    pub const fn elems(&self) -> usize {
        self.rows * self.cols
    }

    fn of(segment: &Segment) -> Extent {
        let Segment { start, trainable, .. } = *segment;
        Extent { start, rows: segment.shape[0], cols: segment.shape[1..].iter().product(), trainable }
    }
}

/// A unit: its tensors, grouped by (trainable, decay), and its length with padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitShape {
    pub kind: UnitKind,
    pub segments: Vec<Segment>,
    pub elems: usize,
    /// Elements at the front that are trained: gradients and moments exist for these alone.
    pub trainable_elems: usize,
    /// Elements at the front of those that decay; the rest of the trainable ones do not.
    pub decay_elems: usize,
}

impl UnitShape {
    pub fn find(&self, param: Param) -> Option<&Segment> {
        self.segments.iter().find(|s| s.param == param)
    }

    /// Where a weight lies. A joined one has a place only if its tensors lie side by side with nothing between
    /// them, all trained or all frozen.
    pub fn extent(&self, param: Param) -> Option<Extent> {
        let mut parts = param.parts().iter().map(|part| self.find(*part).map(Extent::of));
        let mut all = parts.next()??;
        for part in parts {
            let part = part?;
            let next = Extent { start: all.start + all.elems(), rows: part.rows, ..all };
            if part != next {
                return None;
            }
            all.rows += part.rows;
        }
        Some(all)
    }

    /// Elements of the tensors themselves, padding not counted.
    pub fn params(&self) -> u64 {
        self.segments.iter().map(|s| s.elems() as u64).sum()
    }

    fn lay_out(kind: UnitKind, mut segments: Vec<Segment>) -> UnitShape {
        // A stable sort: trained before frozen, decaying before not, else in the family's order.
        segments.sort_by_key(|s| (!s.trainable, !s.decay));
        let (mut at, mut trainable, mut decay) = (0, 0, 0);
        for segment in &mut segments {
            segment.start = at;
            at += padded_elems(segment.elems());
            if segment.trainable {
                trainable = at;
                if segment.decay {
                    decay = at;
                }
            }
        }
        UnitShape { kind, segments, elems: at, trainable_elems: trainable, decay_elems: decay }
    }
}

/// The units of a model. `frozen` marks a model that is never trained (a reference, a reward model).
pub fn units(
    shape: &ModelShape,
    frozen: bool,
    adapter: Option<&Adapter>,
    decay_norms: bool,
) -> Vec<UnitShape> {
    let builder = Builder { frozen: frozen || adapter.is_some(), frozen_model: frozen, adapter, decay_norms };
    let mut all = vec![builder.embed(shape)];
    all.extend((0..shape.layers).map(|layer| builder.block(shape, layer)));
    all.push(builder.head(shape));
    all
}

/// A block as every layer of a trained model has it. Freezing it or adding adapters moves the projections
/// together, so their places relative to each other are those of any model.
pub(crate) fn any_block(shape: &ModelShape) -> UnitShape {
    Builder { frozen: false, frozen_model: false, adapter: None, decay_norms: false }.block(shape, 0)
}

struct Builder<'a> {
    frozen: bool,
    frozen_model: bool,
    adapter: Option<&'a Adapter>,
    decay_norms: bool,
}

impl Builder<'_> {
    fn segment(&self, param: Param, name: String, shape: &[usize]) -> Segment {
        let is_norm = shape.len() == 1;
        Segment {
            param,
            name,
            shape: shape.to_vec(),
            start: 0,
            trainable: !self.frozen,
            decay: !is_norm || self.decay_norms,
            init: if is_norm { Init::One } else { Init::Normal },
        }
    }

    fn embed(&self, m: &ModelShape) -> UnitShape {
        let table = self.segment(Param::Embedding, "model.embed_tokens.weight".into(), &[m.vocab, m.dim]);
        UnitShape::lay_out(UnitKind::Embed, vec![table])
    }

    fn block(&self, m: &ModelShape, layer: usize) -> UnitShape {
        let (d, q, kv, f) = (m.dim, m.q_width(), m.kv_width(), m.ffn);
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let mut segments = vec![
            self.segment(Param::InputNorm, name("input_layernorm"), &[d]),
            self.segment(Param::Q, name("self_attn.q_proj"), &[q, d]),
            self.segment(Param::K, name("self_attn.k_proj"), &[kv, d]),
            self.segment(Param::V, name("self_attn.v_proj"), &[kv, d]),
            self.segment(Param::O, name("self_attn.o_proj"), &[d, q]),
            self.segment(Param::PostNorm, name("post_attention_layernorm"), &[d]),
            self.segment(Param::Gate, name("mlp.gate_proj"), &[f, d]),
            self.segment(Param::Up, name("mlp.up_proj"), &[f, d]),
            self.segment(Param::Down, name("mlp.down_proj"), &[d, f]),
        ];
        if m.architecture.qk_norm() {
            segments.push(self.segment(Param::QNorm, name("self_attn.q_norm"), &[m.head_dim]));
            segments.push(self.segment(Param::KNorm, name("self_attn.k_norm"), &[m.head_dim]));
        }
        self.add_biases(m.biases, &mut segments);
        if let Some(adapter) = self.adapter {
            self.add_adapters(adapter, &mut segments);
        }
        UnitShape::lay_out(UnitKind::Block(layer as u32), segments)
    }

    /// Biases start at zero, and decay where norms do.
    fn add_biases(&self, biases: Biases, segments: &mut Vec<Segment>) {
        for of in Projection::ALL.into_iter().filter(|of| of.has_bias(biases)) {
            let weight = base(segments, of);
            let (name, len) = (format!("{}.bias", stem(weight)), weight.shape[0]);
            let bias = self.segment(Param::BiasOf(of), name, &[len]);
            segments.push(Segment { init: Init::Zero, ..bias });
        }
    }

    fn add_adapters(&self, adapter: &Adapter, segments: &mut Vec<Segment>) {
        for on in Projection::ALL {
            let (_, target) = on.weight();
            if !adapter.targets.iter().any(|t| t == target) {
                continue;
            }
            let base = base(segments, on);
            let (stem, shape) = (stem(base).to_string(), base.shape.clone());
            for (param, suffix, shape, init) in [
                (Param::AdapterA(on), "lora_A", [adapter.rank, shape[1]], Init::Normal),
                (Param::AdapterB(on), "lora_B", [shape[0], adapter.rank], Init::Zero),
            ] {
                let segment = self.segment(param, format!("{stem}.{suffix}.weight"), &shape);
                segments.push(Segment { trainable: !self.frozen_model, init, ..segment });
            }
        }
    }

    fn head(&self, m: &ModelShape) -> UnitShape {
        let mut segments = vec![self.segment(Param::FinalNorm, "model.norm.weight".into(), &[m.dim])];
        if !m.tied {
            segments.push(self.segment(Param::LmHead, "lm_head.weight".into(), &[m.vocab, m.dim]));
        }
        UnitShape::lay_out(UnitKind::Head, segments)
    }
}

/// The weight of a projection.
fn base(segments: &[Segment], of: Projection) -> &Segment {
    segments.iter().find(|s| s.param == of.weight().0).expect("every block has its projections")
}

fn stem(weight: &Segment) -> &str {
    weight.name.trim_end_matches(".weight")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A joined weight covers its tensors' elements, all of them and no others, or it is not there. Freezing,
    /// adapters and decay do not change which.
    #[test]
    fn joined_weights_are_their_tensors_without_padding() {
        let tiny = ModelShape::named("tiny", 300).unwrap();
        let adapter = Adapter { rank: 4, targets: vec!["q_proj".into(), "v_proj".into(), "up_proj".into()] };
        for (dim, head_dim, kv_heads, ffn) in
            [(64, 16, 2, 176), (60, 20, 1, 64), (64, 2, 2, 50), (48, 16, 1, 3)]
        {
            let shape = ModelShape { dim, head_dim, heads: 4, kv_heads, ffn, ..tiny.clone() };
            let (q, kv) = (shape.q_width(), shape.kv_width());
            let fits = |elems: usize| elems.is_multiple_of(256);
            for (frozen, adapter, decay_norms) in [
                (false, None, false),
                (false, None, true),
                (true, None, false),
                (false, Some(&adapter), false),
            ] {
                for block in &units(&shape, frozen, adapter, decay_norms)[1..=shape.layers] {
                    let qkv = block.extent(Param::Qkv);
                    assert_eq!(qkv.is_some(), fits(q * dim) && fits(kv * dim), "{shape:?}");
                    let gate_up = block.extent(Param::GateUp);
                    assert_eq!(gate_up.is_some(), fits(ffn * dim), "{shape:?}");
                    for (joined, param, rows) in
                        [(qkv, Param::Qkv, q + 2 * kv), (gate_up, Param::GateUp, 2 * ffn)]
                    {
                        let Some(joined) = joined else { continue };
                        let trainable = !frozen && adapter.is_none();
                        assert_eq!((joined.rows, joined.cols, joined.trainable), (rows, dim, trainable));
                        let mut at = joined.start;
                        for part in param.parts() {
                            let part = block.find(*part).unwrap();
                            assert_eq!(part.start, at);
                            at += part.elems();
                        }
                        assert_eq!(at, joined.start + joined.elems());
                    }
                }
            }
        }
    }

    #[test]
    fn a_tensor_is_where_its_segment_is() {
        let shape = ModelShape::named("tiny", 300).unwrap();
        for unit in units(&shape, false, None, false) {
            for segment in &unit.segments {
                let extent = unit.extent(segment.param).unwrap();
                assert_eq!((extent.start, extent.elems()), (segment.start, segment.elems()));
                assert_eq!(extent.rows, segment.shape[0]);
            }
        }
    }
}
