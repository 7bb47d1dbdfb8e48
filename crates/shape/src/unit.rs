//! Units and their segments: which tensors a unit has and where each lies in its flat buffer.

use std::fmt;

use lockstep_core::padded_elems;

use crate::{Biases, Head, ModelShape};

/// Which unit of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum UnitKind {
    Embed,
    Block(u32),
    /// The language model's head.
    Head,
    /// A scalar head.
    ScoreHead,
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnitKind::Embed => f.pad("embed"),
            UnitKind::Block(i) => f.pad(&format!("block {i}")),
            UnitKind::Head => f.pad("head"),
            UnitKind::ScoreHead => f.pad("score head"),
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
    /// The scalar head's weight.
    Score,
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

/// The projections of a block: what a bias belongs to.
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

/// Which tensors of a model are not trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Freeze {
    #[default]
    Nothing,
    /// A model that is never trained: a reference, a reward model.
    All,
    /// Those that one of the patterns matches. See [`pattern_matches`].
    Matching(Vec<String>),
}

impl Freeze {
    pub fn freezes(&self, tensor: &str) -> bool {
        match self {
            Freeze::Nothing => false,
            Freeze::All => true,
            Freeze::Matching(patterns) => patterns.iter().any(|pattern| pattern_matches(pattern, tensor)),
        }
    }
}

/// Whether a pattern names a tensor: its whole name, or a module that it is in (`model.layers.0` names all of block
/// 0). `*` stands for any text, dots too.
pub fn pattern_matches(pattern: &str, tensor: &str) -> bool {
    fn glob(pattern: &[u8], text: &[u8]) -> bool {
        match pattern.split_first() {
            None => text.is_empty() || text[0] == b'.',
            Some((b'*', rest)) => (0..=text.len()).any(|skipped| glob(rest, &text[skipped..])),
            Some((byte, rest)) => text.first() == Some(byte) && glob(rest, &text[1..]),
        }
    }
    glob(pattern.as_bytes(), tensor.as_bytes())
}

/// How a weight starts when it is not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightInit {
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
    /// First element among the unit's trained ones, where gradients and optimizer states are kept; `None`: frozen.
    pub trained_start: Option<usize>,
    pub decay: bool,
    pub init: WeightInit,
}

impl Segment {
    pub fn elems(&self) -> usize {
        self.shape.iter().product()
    }

    pub fn is_trained(&self) -> bool {
        self.trained_start.is_some()
    }
}

/// Where a weight lies in its unit: a tensor's segment, or those of a joined weight as one matrix. A vector
/// has one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightExtent {
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    /// Where its gradient begins, if all of it is trained.
    pub trained_start: Option<usize>,
}

impl WeightExtent {
    pub const fn elems(&self) -> usize {
        self.rows * self.cols
    }

    fn of(segment: &Segment) -> WeightExtent {
        let Segment { start, trained_start, .. } = *segment;
        WeightExtent {
            start,
            rows: segment.shape[0],
            cols: segment.shape[1..].iter().product(),
            trained_start,
        }
    }
}

/// Tensors that lie side by side and are treated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamGroup {
    /// Elements `[start, end)` of the unit, whole tensors with their padding.
    pub start: usize,
    pub end: usize,
    /// Where it begins among the unit's trained elements; `None`: frozen.
    pub trained_start: Option<usize>,
    pub decay: bool,
}

/// Groups that lie side by side and have the same states. Ranks shard it as one range, like FSDP's flat parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatParam {
    pub start: usize,
    pub end: usize,
    pub trained_start: Option<usize>,
}

impl FlatParam {
    pub const fn elems(&self) -> usize {
        self.end - self.start
    }
}

/// A unit: its tensors, the groups they form, and its length with padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitShape {
    pub kind: UnitKind,
    pub segments: Vec<Segment>,
    pub groups: Vec<ParamGroup>,
    pub elems: usize,
    /// Gradients and optimizer states exist for these alone, one trained group after the other.
    pub trained_elems: usize,
}

impl UnitShape {
    pub fn find(&self, param: Param) -> Option<&Segment> {
        self.segments.iter().find(|s| s.param == param)
    }

    /// Where a weight lies. A joined one has a place only if its tensors lie side by side with nothing between
    /// them.
    pub fn extent(&self, param: Param) -> Option<WeightExtent> {
        let mut parts = param.parts().iter().map(|part| self.find(*part).map(WeightExtent::of));
        let mut all = parts.next()??;
        for part in parts {
            let part = part?;
            if part.start != all.start + all.elems() || part.cols != all.cols {
                return None;
            }
            all.trained_start = all.trained_start.filter(|_| part.trained_start.is_some());
            all.rows += part.rows;
        }
        Some(all)
    }

    pub fn is_trained(&self, param: Param) -> bool {
        self.find(param).is_some_and(Segment::is_trained)
    }

    /// What ranks shard: neighbouring groups that are all trained or all frozen make one, so that small tensors are not
    /// sharded by themselves.
    pub fn flat_params(&self) -> Vec<FlatParam> {
        let mut flat: Vec<FlatParam> = Vec::new();
        for group in &self.groups {
            match flat.last_mut() {
                Some(last) if last.trained_start.is_some() == group.trained_start.is_some() => {
                    last.end = group.end
                }
                _ => flat.push(FlatParam {
                    start: group.start,
                    end: group.end,
                    trained_start: group.trained_start,
                }),
            }
        }
        flat
    }

    /// Elements of the tensors themselves, padding not counted.
    pub fn params(&self) -> u64 {
        self.segments.iter().map(|s| s.elems() as u64).sum()
    }

    /// The same of those that are trained.
    pub fn trained_params(&self) -> u64 {
        self.segments.iter().filter(|s| s.is_trained()).map(|s| s.elems() as u64).sum()
    }

    fn lay_out(kind: UnitKind, mut segments: Vec<Segment>) -> UnitShape {
        // A stable sort: decaying before not, else in the family's order. Freezing a tensor moves none, so that
        // products of joined weights stay joined.
        segments.sort_by_key(|s| !s.decay);
        let mut groups: Vec<ParamGroup> = Vec::new();
        let (mut at, mut trained) = (0, 0);
        for segment in &mut segments {
            let padded = padded_elems(segment.elems());
            let (start, end, decay) = (at, at + padded, segment.decay);
            segment.start = start;
            segment.trained_start = segment.trained_start.map(|_| trained);
            match groups.last_mut() {
                Some(last) if (last.trained_start.is_some(), last.decay) == (segment.is_trained(), decay) => {
                    last.end = end;
                }
                _ => groups.push(ParamGroup { start, end, trained_start: segment.trained_start, decay }),
            }
            at = end;
            trained += if segment.is_trained() { padded } else { 0 };
        }
        UnitShape { kind, segments, groups, elems: at, trained_elems: trained }
    }
}

/// The units of a model.
pub fn units(shape: &ModelShape, freeze: &Freeze, decay_norms: bool) -> Vec<UnitShape> {
    let builder = UnitBuilder { freeze, decay_norms };
    let mut all = vec![builder.embed(shape)];
    all.extend((0..shape.layers).map(|layer| builder.block(shape, layer)));
    all.push(builder.head(shape));
    all
}

struct UnitBuilder<'a> {
    freeze: &'a Freeze,
    decay_norms: bool,
}

impl UnitBuilder<'_> {
    fn segment(&self, param: Param, name: String, shape: &[usize]) -> Segment {
        let is_norm = shape.len() == 1;
        Segment {
            param,
            shape: shape.to_vec(),
            start: 0,
            // Where, is known when all are there.
            trained_start: (!self.freeze.freezes(&name)).then_some(0),
            name,
            decay: !is_norm || self.decay_norms,
            init: if is_norm { WeightInit::One } else { WeightInit::Normal },
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
        UnitShape::lay_out(UnitKind::Block(layer as u32), segments)
    }

    /// Biases start at zero, and decay where norms do.
    fn add_biases(&self, biases: Biases, segments: &mut Vec<Segment>) {
        for of in Projection::ALL.into_iter().filter(|of| of.has_bias(biases)) {
            let weight = base(segments, of);
            let (name, len) = (format!("{}.bias", stem(weight)), weight.shape[0]);
            let bias = self.segment(Param::BiasOf(of), name, &[len]);
            segments.push(Segment { init: WeightInit::Zero, ..bias });
        }
    }

    fn head(&self, m: &ModelShape) -> UnitShape {
        let mut segments = vec![self.segment(Param::FinalNorm, "model.norm.weight".into(), &[m.dim])];
        if m.head == Head::Score {
            segments.push(self.segment(Param::Score, "score.weight".into(), &[1, m.dim]));
            return UnitShape::lay_out(UnitKind::ScoreHead, segments);
        }
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

    fn freeze(patterns: &[&str]) -> Freeze {
        Freeze::Matching(patterns.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn patterns_name_tensors_modules_and_anything_between() {
        let name = "model.layers.10.self_attn.q_proj.weight";
        for pattern in
            [name, "model.layers.10", "*q_proj", "*.self_attn.*", "model.layers.1*", "*", "model*weight"]
        {
            assert!(pattern_matches(pattern, name), "{pattern}");
        }
        for pattern in ["model.layers.1", "q_proj", "*k_proj*", "", "model.layers.10.self", "*q_pro"] {
            assert!(!pattern_matches(pattern, name), "{pattern}");
        }
    }

    /// A joined weight covers its tensors' elements, all of them and no others, or it is not there. Freezing
    /// and decay do not change which.
    #[test]
    fn joined_weights_are_their_tensors_without_padding() {
        let tiny = ModelShape::named("tiny", 300).unwrap();
        for (dim, head_dim, kv_heads, ffn) in
            [(64, 16, 2, 176), (60, 20, 1, 64), (64, 2, 2, 50), (48, 16, 1, 3)]
        {
            let shape = ModelShape { dim, head_dim, heads: 4, kv_heads, ffn, ..tiny.clone() };
            let (q, kv) = (shape.q_width(), shape.kv_width());
            let fits = |elems: usize| elems.is_multiple_of(256);
            let k_frozen = freeze(&["*k_proj", "*norm"]);
            for (freeze, decay_norms) in [
                (&Freeze::Nothing, false),
                (&Freeze::Nothing, true),
                (&Freeze::All, false),
                (&k_frozen, false),
                (&k_frozen, true),
            ] {
                for block in &units(&shape, freeze, decay_norms)[1..=shape.layers] {
                    let qkv = block.extent(Param::Qkv);
                    assert_eq!(qkv.is_some(), fits(q * dim) && fits(kv * dim), "{shape:?}");
                    let gate_up = block.extent(Param::GateUp);
                    assert_eq!(gate_up.is_some(), fits(ffn * dim), "{shape:?}");
                    for (joined, param, rows) in
                        [(qkv, Param::Qkv, q + 2 * kv), (gate_up, Param::GateUp, 2 * ffn)]
                    {
                        let Some(joined) = joined else { continue };
                        let trained = param.parts().iter().all(|part| block.is_trained(*part));
                        assert_eq!(
                            (joined.rows, joined.cols, joined.trained_start.is_some()),
                            (rows, dim, trained)
                        );
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
        for unit in units(&shape, &Freeze::Nothing, false) {
            for segment in &unit.segments {
                let extent = unit.extent(segment.param).unwrap();
                assert_eq!((extent.start, extent.elems()), (segment.start, segment.elems()));
                assert_eq!(extent.rows, segment.shape[0]);
            }
        }
    }

    /// Groups cover the unit, flat parameters cover the groups, and trained elements are contiguous.
    #[test]
    fn groups_and_flat_params_cover_a_unit() {
        let shape = ModelShape::named("tiny", 300).unwrap();
        for patterns in
            [&[][..], &["*norm"], &["*k_proj"], &["*"], &["*self_attn*", "model.layers.1"], &["*down_proj"]]
        {
            for unit in units(&shape, &freeze(patterns), false) {
                let ends = |at: usize, start: usize, end: usize| (start == at).then_some(end);
                let groups = unit.groups.iter().try_fold(0, |at, g| ends(at, g.start, g.end));
                let flat = unit.flat_params().iter().try_fold(0, |at, c| ends(at, c.start, c.end));
                assert_eq!((groups, flat), (Some(unit.elems), Some(unit.elems)));
                assert!(
                    unit.flat_params()
                        .windows(2)
                        .all(|w| w[0].trained_start.is_some() != w[1].trained_start.is_some())
                );
                let mut at = 0;
                for segment in &unit.segments {
                    let frozen = freeze(patterns).freezes(&segment.name);
                    assert_eq!(segment.trained_start, (!frozen).then_some(at), "{}", segment.name);
                    at += if frozen { 0 } else { padded_elems(segment.elems()) };
                }
                assert_eq!(at, unit.trained_elems);
            }
        }
    }
}
