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
